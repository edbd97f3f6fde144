"""The header that makes a sealed generation file a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import _header
from .._header import TensorInfo
from ._ranges import WrittenRange

__all__ = ["header_for", "reserve_for"]

_BYTES_PER_ENTRY = 160
_SLICES_EXPECTED = 4


def reserve_for(declared: Mapping[str, tuple[int, str]], stripes: int, stripe_bytes: int) -> int:
    """Return the bytes to reserve for a header at the start of each file, in whole pages: enough for every declared
    name to be written in several slices. `declared`: (bytes, dtype) by name; `stripes`: the number of paths, over which
    names are striped in units of `stripe_bytes`. Any one file may come to hold all names, so each gets room for all.
    """
    entries, text = 0, 0
    for name, (nbytes, _) in declared.items():
        units = 1 if stripes == 1 else -(-nbytes // stripe_bytes)
        entries += units + _SLICES_EXPECTED
        text += (units + _SLICES_EXPECTED) * len(name.encode("unicode_escape"))
    # Every extent may be followed by a gap entry up to the next page.
    need = 8 + 512 + text + 2 * entries * _BYTES_PER_ENTRY
    return -(-need // _header.PAGE) * _header.PAGE


def header_for(
    pieces: Sequence[WrittenRange], declared: Mapping[str, tuple[int, str]], reserved: int, file_bytes: int
) -> tuple[bytes, dict[tuple[str, int], str]] | None:
    """Return the header of one file, exactly ``reserved`` bytes, and the entry name of each range, by (name, begin);
    None if it does not fit.

    `pieces`: the ranges in the file. `declared`: (bytes, dtype) by name. An entry is the name, or `<name>@<begin>` for
    a part of it, which is U8 if it is not whole elements. Bytes between extents, and up to `file_bytes`, become entries
    called `__gap__.<n>`, since the format allows no holes.
    """
    entries, keys, position, gaps = [], {}, 0, 0
    for piece in sorted(pieces, key=lambda p: p.file_offset):
        nbytes, dtype = declared[piece.name]
        begin = piece.file_offset - reserved
        if begin > position:
            entries.append(TensorInfo(f"__gap__.{gaps}", "U8", (begin - position,), position, begin))
            gaps += 1
        item_bytes = _header.ITEM_BITS[dtype] // 8
        if piece.begin % item_bytes or piece.nbytes % item_bytes:
            dtype, item_bytes = "U8", 1
        key = piece.name if (piece.begin, piece.nbytes) == (0, nbytes) else f"{piece.name}@{piece.begin}"
        position = begin + piece.nbytes
        entries.append(TensorInfo(key, dtype, (piece.nbytes // item_bytes,), begin, position))
        keys[piece.name, piece.begin] = key
    if position < file_bytes - reserved:
        entries.append(
            TensorInfo(f"__gap__.{gaps}", "U8", (file_bytes - reserved - position,), position, file_bytes - reserved)
        )
    header = _header.build(entries, {"format": "zero-nvme-aio extents"}, reserved)
    if len(header) != reserved:
        return None
    return header, keys
