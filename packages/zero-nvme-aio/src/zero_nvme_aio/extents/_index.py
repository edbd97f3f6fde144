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
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .. import _native
from .._request import format_checksum
from .._tensors import sync_folder
from ..errors import FormatError
from ._pieces import Piece

__all__ = ["Sealed", "read_index", "write_index"]

_FORMAT = "zero-nvme-aio extents"


class Sealed(NamedTuple):
    """What an index says. `files`: stripe -> (name, bytes); `keys`: (name, offset) -> safetensors entry."""

    generation: int
    kind: str
    stripes: int
    files: Mapping[int, tuple[str, int]]
    pieces: list[Piece]
    keys: Mapping[tuple[str, int], str]


def write_index(path: str, sealed: Sealed) -> None:
    """Writes the index so that it is either complete or absent, and lasts."""
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


def read_index(path: str) -> Sealed:
    """Reads and checks an index; FormatError when it is damaged or of an unknown version."""
    with open(path, "rb") as file:
        line, _, body = file.read().partition(b"\n")
    got = format_checksum(_native.checksum(body))
    if line.decode(errors="replace") != got:
        raise FormatError(f"'{path}' is damaged: its checksum is {got}", path=path, expected=repr(line)[:60], got=got)
    table = json.loads(body)
    if table.get("format") != _FORMAT or table.get("version") != 1:
        raise FormatError(f"'{path}': expected version 1 of '{_FORMAT}', got {table.get('version')!r}", path=path)
    pieces, keys = [], {}
    for name, begin, nbytes, stripe, file_offset, checksum, key in _rows(table["extents"]):
        pieces.append(Piece(name, begin, nbytes, table["generation"], stripe, file_offset, checksum))
        keys[name, begin] = key
    files = {int(stripe): (entry[0], entry[1]) for stripe, entry in table["files"].items()}
    return Sealed(table["generation"], table["kind"], table["stripes"], files, pieces, keys)


def _rows(extents: Mapping[str, list[list[object]]]) -> Iterable[tuple[str, int, int, int, int, str, str]]:
    for name, rows in extents.items():
        for row in rows:
            yield (name, *row)  # type: ignore[misc]
