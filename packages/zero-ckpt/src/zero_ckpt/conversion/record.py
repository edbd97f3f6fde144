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
    """The record at `path` of an output that is made from `made_from`; it begins with the work of an earlier run of the
    same conversion.

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
        """Return whether `file` was finished by an earlier run or this one, and is still the same file."""
        try:
            stamp = _stamp(os.lstat(self.folder / file))
        except FileNotFoundError:
            return False
        return self._files.get(file) == stamp

    def done(self, file: str) -> dict[str, int]:
        """Return those tensors of an unfinished file that are on disk: their CRC-32 by name, as a new dict."""
        return {name: found for name, found in self._files.get(file, {}).items() if name not in _STAMP}

    def note(self, file: str, tensors: dict[str, int], nbytes: int) -> None:
        """Note that `tensors` (name to CRC-32), all that are done so far of `file`, are on disk, `nbytes` more than
        before. The record itself is written once 256 MiB are new."""
        self._note(file, tensors, nbytes)

    def complete(self, file: str, status: os.stat_result, nbytes: int, *, now: bool) -> None:
        """Note that a finished file is on disk and complete once it is renamed to `file`; `status` is its `os.stat`
        result, by which it is recognised. With `now` the record is written at once, otherwise once 256 MiB are new, of
        which this file is `nbytes`."""
        self._note(file, _stamp(status), RECORD_BYTES if now else nbytes)

    def _note(self, file: str, what: dict[str, int], nbytes: int) -> None:
        """Set the entry of `file` in the record to `what`, after `nbytes` more bytes of the file are on disk. The
        record is written once 256 MiB are new."""
        with self._lock:
            self._files[file] = what
            self._unrecorded_nbytes += nbytes
            if self._unrecorded_nbytes >= RECORD_BYTES:
                self._write()

    def _write(self) -> None:
        """Write the record to a new file, which is locked, and replace the old one by it; it is on disk on return. The
        caller makes sure that no other thread changes the record."""
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
        """Drop all entries, so that nothing counts as done; that is on disk on return."""
        with self._lock:
            self._files = {}
            self._write()

    def close(self, *, keep: bool) -> None:
        """Release the lock. With `keep` the record is written for another run, otherwise removed."""
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
        """Return the entries, by file, that an earlier run of the same conversion has left; empty if there was none."""
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
