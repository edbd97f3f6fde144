"""The progress of an unfinished conversion, in a file beside its output.

[Note: records of conversions]
The record says what the output is made from, which files are complete, and of the file that is being filled, which
tensors are on disk, with the CRC-32 of their bytes. A complete file is known by its inode, size and time of
modification, which are recorded before it takes its name: so a run that died in between knows it, too, and a file that
was written since, or another one that got the inode, is not taken for it. A run that makes the same from the same
source continues behind it. It is written after the bytes it speaks of are on disk, and is removed when the output is
complete.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from ..durable import fsync_directory
from ..errors import DamagedError
from ..locking import open_locked, unlock_and_close
from ..opened import read_bounded
from ..plain import pack, unpack
from .partial_file import write_at

RECORD_BYTES = 256 << 20
"""After so many bytes a conversion notes how far it is."""
_MAX_BYTES = 256 << 20
_STAMP = "\0inode", "\0bytes", "\0modified"


class ConversionRecord:
    """The record at `path` of an output that `made_from` identifies, with the work of an earlier run in it.

    `made_from` is any text that differs when the output would. Files are named by their path relative to `folder`, in
    which the record lies. It is locked until `close`. Raises CheckpointError when another process is writing the same
    output. Safe to use from several threads.
    """

    def __init__(self, path: Path, made_from: str) -> None:
        self.folder, self._path, self._made_from = path.parent, path, made_from
        self._next = path.with_name(path.name + ".new")
        self._lock = threading.Lock()
        self._unrecorded_nbytes = 0
        self._fd = open_locked(path)
        self._files = self._read()

    @property
    def is_new(self) -> bool:
        """Return whether nothing has been done for this output, by an earlier run or this one."""
        return not self._files

    def is_complete(self, file: str) -> bool:
        """Return whether a file is finished, by an earlier run or this one."""
        try:
            stamp = _stamp(os.lstat(self.folder / file))
        except FileNotFoundError:
            return False
        return self._files.get(file) == stamp

    def done(self, file: str) -> dict[str, int]:
        """Return the tensors of an unfinished file that are on disk, by name, with their CRC-32, as a new dict."""
        return {name: found for name, found in self._files.get(file, {}).items() if name not in _STAMP}

    def note(self, file: str, tensors: dict[str, int], nbytes: int) -> None:
        """Record that these tensors of a file (name to CRC-32), all that are done so far, are on disk, `nbytes` more
        than before. The record itself is written once 256 MiB are new."""
        self._note(file, tensors, nbytes)

    def complete(self, file: str, status: os.stat_result, nbytes: int, *, now: bool) -> None:
        """Record that a file with `nbytes` bytes of tensors is on disk, and is complete once the one of this `status`
        has its name; written `now`, or as by `note`."""
        self._note(file, _stamp(status), RECORD_BYTES if now else nbytes)

    def _note(self, file: str, what: dict[str, int], nbytes: int) -> None:
        """Set the entry of a file to `what`, after `nbytes` more bytes of it are on disk; write the record once 256 MiB
        are new.
        """
        with self._lock:
            self._files[file] = what
            self._unrecorded_nbytes += nbytes
            if self._unrecorded_nbytes >= RECORD_BYTES:
                self._write()

    def _write(self) -> None:
        """Write the record to a new file, which is locked, and put that in the place of the old one; it is on disk on
        return.
        """
        fd = open_locked(self._next)
        try:
            os.ftruncate(fd, 0)  # a run that died may have left one
            write_at(fd, pack({"made_from": self._made_from, "files": self._files}), 0)
            os.fsync(fd)
            self._next.replace(self._path)
        except BaseException:
            self._next.unlink(missing_ok=True)
            unlock_and_close(fd)
            raise
        fd, self._fd = self._fd, fd
        unlock_and_close(fd)
        fsync_directory(self._path.parent)
        self._unrecorded_nbytes = 0

    def forget(self) -> None:
        """Record that nothing is done, as for a new output; it is on disk on return."""
        with self._lock:
            self._files = {}
            self._write()

    def close(self, *, keep: bool) -> None:
        """Release the lock; `keep`: write the record for another run, otherwise remove it."""
        try:
            if keep:
                self._write()
            else:
                self._next.unlink(missing_ok=True)
                self._path.unlink(missing_ok=True)
                fsync_directory(self._path.parent)
        finally:
            unlock_and_close(self._fd)

    def _read(self) -> dict[str, dict[str, int]]:
        """Return the entries of an earlier run of the same conversion by file; empty if there was none."""
        try:
            found = unpack(read_bounded(self._fd, _MAX_BYTES, str(self._path)))
        except DamagedError:  # new, or cut short: nothing is known
            return {}
        if not isinstance(found, dict) or found.get("made_from") != self._made_from:
            return {}
        files = found.get("files")
        return files if isinstance(files, dict) and all(map(_is_progress, files.values())) else {}


def _stamp(status: os.stat_result) -> dict[str, int]:
    """Return what identifies a complete file: its inode, size and time of modification, by the keys of `_STAMP`."""
    return dict(zip(_STAMP, (status.st_ino, status.st_size, status.st_mtime_ns), strict=True))


def _is_progress(what: Any) -> bool:
    """Return whether `what` can be the entry of a file in a record: integers by name."""
    return isinstance(what, dict) and all(type(value) is int for value in what.values())
