"""Checksums of bytes in files, a few MiB in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .checksum import Checksummer
from .errors import DamagedError
from .opened import read_fd

SCAN_BYTES = 4 << 20


def scan(path: Path, begin: int, nbytes: int, where: str, progress: Callable[[int], None] | None = None) -> str:
    """Return the checksum of `nbytes` bytes of the file `path` from byte `begin` on.

    Calls `progress` with the number of bytes of each read. Raises DamagedError, whose message begins with `where`, when
    the bytes cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{where}: {error.strerror}") from error
    try:
        return scan_fd(fd, begin, nbytes, where, progress)
    finally:
        os.close(fd)


def scan_fd(
    fd: int,
    begin: int,
    nbytes: int,
    where: str,
    progress: Callable[[int], None] | None = None,
    whole: Checksummer | None = None,
) -> str:
    """Return the checksum of `nbytes` bytes of an open file from byte `begin` on. `whole`: a further checksum that is
    updated with the same bytes.

    `progress` is called with the number of bytes of each read. Raises DamagedError, whose message begins with `where`,
    when the bytes cannot be read.
    """
    total, scratch = Checksummer(), memoryview(bytearray(min(SCAN_BYTES, nbytes)))
    for position in range(begin, begin + nbytes, SCAN_BYTES):
        part = scratch[: min(SCAN_BYTES, begin + nbytes - position)]
        read_fd(fd, position, part, where)
        total.update(part)
        if whole is not None:
            whole.update(part)
        if progress is not None:
            progress(part.nbytes)
    return total.result()
