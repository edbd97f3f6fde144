"""The header of a safetensors file: 8 bytes of length, then JSON that maps keys to dtype, shape and byte range."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from .errors import DamagedError
from .opened import read_fd
from .plain import first_duplicate
from .types import ITEMSIZE, numel

MAX_HEADER_BYTES = 100_000_000 + 8 + 4096
"""No longer header is read: safetensors' own limit, the bytes of the length, and padding."""
_OBJECT_BYTES, _OBJECT_BYTES_PER_BYTE = 256 << 20, 8
_ALIGNMENT = 4096


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor in a safetensors header; `begin` and `end` are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, int]:
    """Return the header for tensors that follow one another in the order given, and the file's size in bytes.

    Each entry is (key, dtype, shape), the dtype a key of `ITEMSIZE`. `metadata` becomes `__metadata__`. The header is
    padded with spaces to a multiple of 4096 bytes, so that data starts on a block boundary.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for key, dtype, shape in entries:
        end = position + numel(shape) * ITEMSIZE[dtype]
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT
    header = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    return header, padded + position


def parse_header(raw: bytes, file_nbytes: int, where: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Return the entries by key, and the metadata, of a header as it is on disk (its 8 bytes of length included).

    `file_nbytes`, the file's size, bounds every position; `where` names the file in errors. Raises DamagedError for
    anything that is not valid, overlapping entries included.
    """
    _require_small(raw, where)
    try:
        table = json.loads(raw[8:].decode(), object_pairs_hook=_dict_of_pairs)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedError(f"{where}: the safetensors header is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise DamagedError(f"{where}: the safetensors header is not a map")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedError(f"{where}: __metadata__ of the safetensors header is not a map of strings")
    entries = {key: _entry(key, value, len(raw), file_nbytes, where) for key, value in table.items()}
    _require_encodable_texts((*entries, *metadata, *metadata.values()), where)
    _require_no_overlap(entries, where)
    return entries, metadata


def _require_small(raw: bytes, where: str) -> None:
    """Raise DamagedError for a header that would take far more memory to parse than a sound one, before it is parsed.

    `raw` is the header, its 8 bytes of length included; `where` names the file in errors.
    """
    if len(raw) > MAX_HEADER_BYTES:
        raise DamagedError(f"{where}: a safetensors header of {len(raw)} bytes, expected at most {MAX_HEADER_BYTES}")
    cost = 200 * raw.count(b"{") + 72 * raw.count(b"[") + 40 * raw.count(b",")
    if cost > _OBJECT_BYTES + _OBJECT_BYTES_PER_BYTE * len(raw):
        raise DamagedError(f"{where}: the safetensors header holds too many values for its {len(raw)} bytes")


def _dict_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the (key, value) pairs of a JSON object as a dict. Raises ValueError for a key that is there twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"the key {first_duplicate(key for key, _ in pairs)!r} appears twice")
    return table


def _require_encodable_texts(texts: Iterable[str], where: str) -> None:
    """Raise DamagedError if a text has half a surrogate pair, which UTF-8 cannot encode; `where` names the file in
    errors."""
    for text in texts:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DamagedError(
                    f"{where}: {text!r} in the safetensors header is not valid Unicode: {error.reason}"
                ) from error


def _require_no_overlap(entries: Mapping[str, HeaderEntry], where: str) -> None:
    """Raise DamagedError when two of `entries`, a header's by key, share a byte of the file; `where` names the file in
    errors."""
    end, before = 0, ""
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin < end and entry.begin < entry.end:
            raise DamagedError(f"{where}: entries {before!r} and {key!r} overlap at byte {entry.begin}")
        if entry.end > end:
            end, before = entry.end, key


def _entry(key: str, value: Any, header_nbytes: int, file_nbytes: int, where: str) -> HeaderEntry:
    """Return the header entry of `key` with byte positions in the file. Raises DamagedError when it is not valid.

    `value` is what the header's JSON has for the key; its offsets count from the end of the header, which has
    `header_nbytes` bytes. The file has `file_nbytes`, and `where` names it in errors.
    """
    if not isinstance(value, dict):
        raise DamagedError(f"{where}: entry {key!r} of the safetensors header is not a map")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise DamagedError(f"{where}: entry {key!r} has the unknown dtype {dtype!r}")
    if not (_is_list_of_sizes(shape) and _is_list_of_sizes(offsets) and len(offsets) == 2):
        raise DamagedError(f"{where}: entry {key!r} has no valid shape and data_offsets")
    begin, end = (header_nbytes + offset for offset in offsets)
    if not begin <= end <= file_nbytes or end - begin != numel(tuple(shape)) * ITEMSIZE[dtype]:
        raise DamagedError(
            f"{where}: entry {key!r} ({dtype}, shape {shape}) cannot lie at bytes {begin} to {end} "
            f"of a file of {file_nbytes} bytes"
        )
    return HeaderEntry(dtype, tuple(shape), begin, end)


def _is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether `value` is a list of at most 64 integers from 0 to 2**62 - 1, as a shape is."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(size) is int and 0 <= size < 1 << 62 for size in value)
    )


def read_header(path: str | os.PathLike[str]) -> tuple[bytes, int]:
    """Return the raw header of a safetensors file (its 8 bytes of length included), and the file's size in bytes.

    The header is not parsed. Raises DamagedError when the file cannot be read or its header is longer than allowed or
    than the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{path}: not a regular file")
        nbytes, prefix = found.st_size, bytearray(8)
        if nbytes >= 8:
            read_fd(fd, 0, memoryview(prefix), str(path))
        length = int.from_bytes(prefix, "little")
        if nbytes < 8 or length > min(MAX_HEADER_BYTES - 8, nbytes - 8):
            raise DamagedError(f"{path}: not a safetensors file (header of {length} bytes in a file of {nbytes})")
        raw = prefix + bytearray(length)
        read_fd(fd, 8, memoryview(raw)[8:], str(path))
    finally:
        os.close(fd)
    return bytes(raw), nbytes
