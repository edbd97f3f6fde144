"""Lines with a checksum, by which a damaged or incomplete line is recognised."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_DIGITS = 9  # eight of the checksum, one space
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def encode(value: Any) -> bytes:
    """Return ``value`` as one line. Numbers that JSON cannot hold become null."""
    return encode_text(json_text(value))


def json_text(value: Any) -> str:
    """Return ``value`` as JSON without spaces; numbers that JSON cannot hold become null."""
    try:
        return _JSON.encode(value)
    except ValueError:
        return _JSON.encode(_finite(value))


def encode_text(text: str) -> bytes:
    """Return JSON, which holds no newline, as one line."""
    body = text.encode("utf-8", "backslashreplace")
    return b"%08x %s\n" % (zlib.crc32(body), body)


class Lines(NamedTuple):
    """The undamaged lines of a file, without checksums, and the bytes and number of the damaged ones."""

    bodies: list[bytes]
    damaged_bytes: int
    damaged_lines: int


def read(path: Path) -> Lines:
    """Read the undamaged lines of ``path``. Raises OSError."""
    data = path.read_bytes()
    bodies: list[bytes] = []
    damaged = lines = 0
    for line in _split(data):
        body = line[_DIGITS:-1]
        if line[-1:] == b"\n" and line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(body):
            bodies.append(body)
        else:
            damaged += len(line)
            lines += 1
    return Lines(bodies, damaged, lines)


def _split(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def _finite(value: Any) -> Any:
    """Return a value for JSON in which infinities and NaN are None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
