"""Lines of JSON with a checksum, which reveals damaged and incomplete lines. A line is the checksum, the JSON (its
body) and a newline."""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_DIGITS = 9  # eight of the checksum, one space
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def encode(value: Any) -> bytes:
    """Return ``value``, plain data, as one line of the record, as bytes. Infinities and NaN become null."""
    return encode_text(json_text(value))


def json_text(value: Any) -> str:
    """Return ``value``, plain data, as JSON without spaces. Infinities and NaN become null."""
    try:
        return _JSON.encode(value)
    except ValueError:
        return _JSON.encode(_finite(value))


def encode_text(text: str) -> bytes:
    """Return JSON text without newlines as one line of the record: checksum, text, newline."""
    body = text.encode("utf-8", "backslashreplace")
    return b"%08x %s\n" % (zlib.crc32(body), body)


class Lines(NamedTuple):
    """The lines of a file: ``bodies``, the JSON of the undamaged ones, in order, and the total bytes and the number of
    the damaged ones."""

    bodies: list[bytes]
    damaged_bytes: int
    damaged_lines: int


def read(path: Path) -> Lines:
    """Read the file ``path`` and return the JSON of its undamaged lines, with the bytes and the number of the others.
    Raises OSError if the file cannot be read."""
    data = read_regular(path)
    bodies: list[bytes] = []
    damaged = lines = 0
    for line in _split_lines(data):
        body = line[_DIGITS:-1]
        if line[-1:] == b"\n" and line[8:9] == b" " and line[:8] == b"%08x" % zlib.crc32(body):
            bodies.append(body)
        else:
            damaged += len(line)
            lines += 1
    return Lines(bodies, damaged, lines)


def read_regular(path: Path) -> bytes:
    """Return the bytes of the regular file ``path``. Raises OSError if it cannot be read or is no regular file; a pipe,
    say, would never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.read_bytes()


def _split_lines(data: bytes) -> Iterator[bytes]:
    """Yield the lines of a file's content with their newlines; the last one may lack it."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def _finite(value: Any) -> Any:
    """Return a copy of ``value`` with None in place of infinities and NaN, at any depth; keys become strings, tuples
    lists."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
