"""A file that is written in pieces, and completed later when it was interrupted.

[Note: resumable files]
`<path>.partial` is the file at its final size, followed by a trailer: magic, a digest of what the file is made from,
and how many of its first bytes are on disk. A run that makes the same file from the same source continues behind those
bytes. The trailer is cut off before the file takes its name.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from ..locking import open_locked, unlock_and_close
from .checks import move_into_place

_MAGIC = b"ZPARTIAL"
_TRAILER = struct.Struct("<8s8sQ")


class PartialFile:
    """The file `path` of `nbytes` bytes while it is being written; `made_from` is a digest that differs when any of its
    bytes would.

    `done` is the number of first bytes that an earlier run with the same `made_from` left on disk; 0 for a new file.
    The object ends with `finish` or `abort`. Raises CheckpointError when another process is writing the same file.
    """

    def __init__(self, path: Path, nbytes: int, made_from: bytes) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._nbytes, self._digest = nbytes, xxhash.xxh3_64_digest(made_from)
        self._fd = open_locked(self._partial)
        try:
            self.done = self._recorded()
            if not self.done:
                os.ftruncate(self._fd, 0)
                os.ftruncate(self._fd, nbytes + _TRAILER.size)
        except BaseException:
            unlock_and_close(self._fd)
            raise

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Write `data` from byte `position` on; safe to call from several threads."""
        write_at(self._fd, data, position)

    def record(self, done: int) -> None:
        """Wait until everything written is on disk, and record that the first `done` bytes need not be written
        again."""
        os.fdatasync(self._fd)
        self.write(_TRAILER.pack(_MAGIC, self._digest, done), self._nbytes)

    def finish(self, *, overwrite: bool) -> None:
        """Wait until all is on disk, rename the file to `path`, and close it.

        Raises CheckpointError, with the file still open, when there is a file at `path`, unless `overwrite`.
        """
        os.ftruncate(self._fd, self._nbytes)
        os.fsync(self._fd)
        move_into_place(self._partial, self._path, overwrite)
        unlock_and_close(self._fd)

    def abort(self, *, keep: bool) -> None:
        """Close the unfinished file. With `keep` it stays for another run, otherwise it is removed."""
        if not keep:
            self._partial.unlink(missing_ok=True)
        unlock_and_close(self._fd)

    def _recorded(self) -> int:
        """Return the number of first bytes that an earlier run of the same conversion left on disk; 0 if there is
        none."""
        if os.fstat(self._fd).st_size != self._nbytes + _TRAILER.size:
            return 0
        magic, digest, done = _TRAILER.unpack(os.pread(self._fd, _TRAILER.size, self._nbytes))
        return int(done) if (magic, digest) == (_MAGIC, self._digest) and done <= self._nbytes else 0


def write_at(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of `data` at byte `position` of the open file `fd`. Raises OSError when it cannot be written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
