"""The one checksum of the format: `xxh3_64:` and 16 hexadecimal digits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PATTERN = re.compile(r"xxh3_64:[0-9a-f]{16}")


def checksum(data: Buffer) -> str:
    """Return the checksum of a buffer's bytes, `xxh3_64:` and 16 hexadecimal digits."""
    return "xxh3_64:" + xxhash.xxh3_64_hexdigest(data)  # type: ignore[arg-type, unused-ignore]


def is_checksum(text: object) -> bool:
    """Return whether `text` is a well-formed checksum string."""
    return isinstance(text, str) and _PATTERN.fullmatch(text) is not None


class Checksummer:
    """A checksum over bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        """Append the bytes of `data`."""
        self._state.update(data)  # type: ignore[arg-type, unused-ignore]

    def result(self) -> str:
        """Return the checksum of all bytes so far."""
        return "xxh3_64:" + self._state.hexdigest()
