"""Checksums of bytes in files, a few MiB in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .checksum import Checksummer
from .filing import read_at

SCAN_BYTES = 4 << 20


def scan(path: Path, begin: int, nbytes: int, where: str, progress: Callable[[int], None] | None = None) -> str:
    """The checksum of `nbytes` bytes of a file from byte `begin` on; raises DamagedError, beginning with `where`."""
    total, scratch = Checksummer(), memoryview(bytearray(min(SCAN_BYTES, nbytes)))
    for position in range(begin, begin + nbytes, SCAN_BYTES):
        part = scratch[: min(SCAN_BYTES, begin + nbytes - position)]
        read_at(path, position, part, where)
        total.update(part)
        if progress is not None:
            progress(part.nbytes)
    return total.result()
