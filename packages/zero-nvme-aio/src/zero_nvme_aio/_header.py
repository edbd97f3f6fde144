"""The safetensors header: checked when read, padded to a page when written."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import FormatError

__all__ = ["TensorInfo", "build", "parse"]

PAGE = 4096
MAX_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 64
ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """One tensor of a file: dtype in safetensors' spelling, shape, and its bytes [begin, end) after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor's data."""
        return self.end - self.begin


def build(entries: Sequence[TensorInfo], metadata: Mapping[str, str], reserve_bytes: int = 0) -> bytes:
    """Return a safetensors header, which is the length field and the JSON of these entries, padded with spaces so that
    the data behind it begins at a multiple of 4096 bytes.

    `metadata`: strings to strings; left out if empty. `reserve_bytes`: the minimum size, for a header that will be
    rewritten with more entries.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    total = max(8 + len(text), reserve_bytes)
    total = -(-total // PAGE) * PAGE
    return struct.pack("<Q", total - 8) + text.ljust(total - 8)


def header_length(path: str, prefix: bytes, file_bytes: int) -> int:
    """Return the bytes that length field and header have together, from the first eight bytes (`prefix`) of a file of
    `file_bytes`. FormatError, naming `path`, if the file is too short for them.
    """
    if len(prefix) < 8:
        raise FormatError(f"'{path}' is not safetensors: expected at least 8 bytes, got {len(prefix)}", path=path)
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise FormatError(
            f"'{path}' is not safetensors: its header would have {length} bytes in a file of {file_bytes}",
            path=path,
            expected=file_bytes - 8,
            got=length,
        )
    return 8 + int(length)


def parse(path: str, text: bytes, data_bytes: int) -> tuple[list[TensorInfo], dict[str, str]]:
    """Return the entries, in file order, and the metadata of a header's JSON `text`, behind which the file has
    `data_bytes` of data.

    Raises FormatError, naming `path`, for anything that the format does not allow: unknown dtypes, sizes that do not
    match the shape, overlaps, holes and trailing bytes.
    """
    try:
        table = json.loads(text, object_pairs_hook=_dict_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"'{path}': the header is not JSON: {error}", path=path) from None
    if not isinstance(table, dict):
        raise FormatError(f"'{path}': expected the header to be an object, got {type(table).__name__}", path=path)
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"'{path}': expected `__metadata__` to map strings to strings", path=path)
    entries = sorted((_parse_entry(path, name, value) for name, value in table.items()), key=lambda e: (e.begin, e.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            what = "a hole" if entry.begin > position else "an overlap"
            raise FormatError(
                f"'{path}': {what} before tensor {entry.name!r:.200} at byte {entry.begin} of the data", path=path
            )
        position = entry.end
    if position != data_bytes:
        raise FormatError(
            f"'{path}': expected {position} bytes of data after the header, got {data_bytes}; is the file complete?",
            path=path,
            expected=position,
            got=data_bytes,
        )
    return entries, metadata


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs of a JSON object as a dict; ValueError if a key appears twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _parse_entry(path: str, name: str, value: Any) -> TensorInfo:
    """Return the entry of the tensor `name` from its `value` in a header's JSON. FormatError, naming `path`, for an
    invalid name, an unknown dtype, or a size that does not match the shape.
    """
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers_are_whole = len(shape) <= _MOST_DIMENSIONS and all(
            type(n) is int and 0 <= n < 1 << 62 for n in (*shape, begin, end)
        )
        name.encode()  # JSON can spell halves of surrogate pairs
    except (TypeError, KeyError, ValueError):
        numbers_are_whole = False
    if not numbers_are_whole:
        raise FormatError(f"'{path}': tensor {name!r:.200} has no valid name, dtype, shape and data_offsets", path=path)
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise FormatError(f"'{path}': tensor {name!r:.200} has unknown dtype {dtype!r:.40}", path=path)
    elements = 1
    for n in shape:
        elements *= n
    expected = elements * ITEM_BITS[dtype] // 8
    if end - begin != expected:
        raise FormatError(
            f"'{path}': tensor {name!r:.200}, shape {list(shape)} of {dtype}: expected {expected} bytes, "
            f"got {end - begin}",
            path=path,
            expected=expected,
            got=end - begin,
        )
    return TensorInfo(name, dtype, shape, begin, end)
