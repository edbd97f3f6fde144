"""The index of a sealed generation: a small text file whose presence is what makes the generation exist.

Line one is the xxh3_64 of the rest, the rest is JSON:
`{"format": "zero-nvme-aio extents", "version": 1, "generation": k, "kind": "raw" | "safetensors",
"stripes": n, "files": {"<stripe>": [file name, bytes]},
"extents": {name: [[offset, bytes, stripe, file offset, checksum, key], …]}}`.
File names are relative to the folder of their stripe; all numbers are in bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .. import _native
from .._request import format_checksum
from .._tensors import sync_folder
from ..errors import FormatError
from ._ranges import WrittenRange

__all__ = ["SealedIndex", "read_index", "write_index"]

_FORMAT = "zero-nvme-aio extents"
_MOST_BYTES = 1 << 30
_STRIPE = re.compile(r"0|[1-9][0-9]{0,3}")


class SealedIndex(NamedTuple):
    """The content of an index. `generation`: its number. `kind`: "raw" or "safetensors". `stripes`: the number of the
    store's paths. `files`: stripe (number of a path) -> (file name, bytes). `pieces`: all ranges, by name and offset.
    `keys`: (name, offset) -> safetensors entry.
    """

    generation: int
    kind: str
    stripes: int
    files: Mapping[int, tuple[str, int]]
    pieces: list[WrittenRange]
    keys: Mapping[tuple[str, int], str]


def write_index(path: str, sealed: SealedIndex) -> None:
    """Write an index to `path`, and sync it and its folder; the file is either complete or absent. Raises OSError; a
    `.part` file may then stay beside it.
    """
    extents: dict[str, list[list[object]]] = {}
    for piece in sealed.pieces:
        key = sealed.keys.get((piece.name, piece.begin), "")
        row = [piece.begin, piece.nbytes, piece.stripe, piece.file_offset, piece.checksum, key]
        extents.setdefault(piece.name, []).append(row)
    body = json.dumps(
        {
            "format": _FORMAT,
            "version": 1,
            "generation": sealed.generation,
            "kind": sealed.kind,
            "stripes": sealed.stripes,
            "files": {str(stripe): list(entry) for stripe, entry in sealed.files.items()},
            "extents": extents,
        }
    ).encode()
    scratch = f"{path}.part"
    with open(scratch, "wb") as file:
        file.write(format_checksum(_native.checksum(body)).encode() + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync_folder(os.path.dirname(path))


def read_index(path: str) -> SealedIndex:
    """Read and check the index at `path`; FormatError if it is damaged, inconsistent, or of an unknown version. The
    files that it lists need not exist.
    """
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise FormatError(f"'{path}': expected an index of at most {_MOST_BYTES} bytes", path=path)
    line, _, body = content.partition(b"\n")
    got = format_checksum(_native.checksum(body))
    if line.decode(errors="replace") != got:
        raise FormatError(f"'{path}' is damaged: its checksum is {got}", path=path, expected=repr(line)[:60], got=got)
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"'{path}' is no JSON: {error}", path=path) from None
    version = table.get("version") if isinstance(table, dict) and table.get("format") == _FORMAT else None
    if version != 1:
        raise FormatError(f"'{path}': expected version 1 of '{_FORMAT}', got {version!r:.40}", path=path)
    _check_table(path, table)
    pieces, keys = [], {}
    for name, begin, nbytes, stripe, file_offset, checksum, key in _rows(table["extents"]):
        pieces.append(WrittenRange(name, begin, nbytes, table["generation"], stripe, file_offset, checksum))
        keys[name, begin] = key
    files = {int(stripe): (entry[0], entry[1]) for stripe, entry in table["files"].items()}
    return SealedIndex(table["generation"], table["kind"], table["stripes"], files, pieces, keys)


def _check_table(path: str, table: Mapping[str, Any]) -> None:
    """Raise FormatError, with `path` in it, unless every field of `table`, the JSON of an index, has its type and every
    extent lies in a file of the index.
    """
    files, extents = table.get("files"), table.get("extents")
    wrong = [name for name in ("generation", "stripes") if not _is_size(table.get(name))]
    if table.get("kind") not in ("raw", "safetensors"):
        wrong.append("kind")
    if not isinstance(files, dict) or not all(map(_is_file, files, files.values())):
        wrong.append("files")
    if wrong or not isinstance(files, dict) or not isinstance(extents, dict):
        raise FormatError(f"'{path}': {', '.join(wrong) or 'extents'} is not what an index says", path=path)
    for name, rows in extents.items():
        for row in rows if isinstance(rows, list) else [rows]:
            if not _is_row(row) or str(row[2]) not in files or row[3] + row[1] > files[str(row[2])][1]:
                raise FormatError(f"'{path}': {row!r:.200} is no extent of {name!r:.200}", path=path)


def _is_size(value: object) -> bool:
    """Return whether a value is an integer (not a bool) from 0 to 2**62 - 1."""
    return type(value) is int and 0 <= value < 1 << 62


def _is_file(stripe: str, entry: Any) -> bool:
    """Return whether an entry of `files` in an index is valid: its key a decimal path number below 10,000, its value a
    [file name, bytes] whose name has no folder.
    """
    named = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and os.sep not in entry[0]
    return named and "\0" not in entry[0] and _is_size(entry[1]) and _STRIPE.fullmatch(stripe) is not None


def _is_row(row: Any) -> bool:
    """Return whether a row of `extents` in an index has its six fields, of the right types, and is of at least one
    byte.
    """
    whole = isinstance(row, list) and len(row) == 6 and all(map(_is_size, row[:4]))
    return whole and row[1] > 0 and all(isinstance(text, str) for text in row[4:])


def _rows(extents: Mapping[str, list[list[object]]]) -> Iterable[tuple[str, int, int, int, int, str, str]]:
    """Yield (name, offset, bytes, stripe, file offset, checksum, key) for every extent of a checked index."""
    for name, rows in extents.items():
        for row in rows:
            yield (name, *row)  # type: ignore[misc]
