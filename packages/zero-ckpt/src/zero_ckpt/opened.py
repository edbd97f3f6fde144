"""Open what lies below a checkpoint's root: regular files only, no symbolic link followed, memory bounded.

`where` begins the messages of errors. `relative` is a file's path relative to its checkpoint's directory.

[Note: opened folders]
A checkpoint directory is opened once and held by its descriptor; its files are opened relative to that. Every reader
thus sees the files of one directory, also while a save puts another in its place, and a directory that has lost its
name is recognised. The root itself may be a link, as may be a path that the user gives; nothing below it may.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import CheckpointError, DamagedError, ReplacedError

_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_regular(path: str | Path, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor; follows no link in the last component, and never blocks.

    `flags` are those of `os.open`. `folder` is the descriptor of a directory that `path` is relative to. Raises
    OSError, also for what is no regular file.
    """
    try:
        fd = os.open(path, flags | _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed here") from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file")
    except OSError:
        os.close(fd)
        raise
    return fd


def read_bounded(fd: int, limit: int, where: str) -> bytes:
    """Return all bytes of an open file. Raises DamagedError, whose message begins with `where`, when it cannot be read
    or has more than `limit` bytes; that is found before memory is allocated."""
    parts, left = [], limit + 1
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > limit:
            raise DamagedError(f"{where}: {nbytes} bytes, expected at most {limit}")
        while left and (part := os.read(fd, min(left, 1 << 24))):
            parts.append(part)
            left -= len(part)
    except OSError as error:
        raise DamagedError(f"{where}: reading: {error.strerror or error}") from error
    if not left:
        raise DamagedError(f"{where}: it grew beyond {limit} bytes while it was read")
    return b"".join(parts)


def _copy_file(source: int, name: str, folder: int) -> None:
    """Create `name` in a directory with the content and the mode of an open file, on disk on return.

    `source` is the file's descriptor, `folder` that of the directory. Raises OSError, FileExistsError if the name is
    taken.
    """
    found = os.fstat(source)
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
    try:
        position = 0
        while position < found.st_size and (sent := os.sendfile(target, source, position, found.st_size - position)):
            position += sent
        os.fchmod(target, stat.S_IMODE(found.st_mode))
        os.fsync(target)
    finally:
        os.close(target)


class Folder:
    """The checkpoint directory `path`, held open; see [Note: opened folders]. `follow`: the path itself may be a link.

    Raises DamagedError when the directory cannot be opened. Files are named by their path relative to it. The
    descriptor is closed when the object is no longer referenced.
    """

    def __init__(self, path: Path, *, follow: bool) -> None:
        self.path = path
        flags = _DIRECTORY if follow else _DIRECTORY | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags)
        except OSError as error:
            if path.is_symlink() and not follow:
                raise DamagedError(f"{path} is a symbolic link, which is not followed below a root") from error
            raise DamagedError(f"{path}: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._fd).atexit = False

    def open(self, relative: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file in the directory with these `flags` of `os.open`, and return its descriptor, for the
        caller to close.

        Raises OSError, also for a symbolic link.
        """
        with self._parent(relative) as (folder, name):
            return open_regular(name, flags, folder)

    def give_own_copy(self, relative: str) -> None:
        """Replace a file of the directory by a copy of it, atomically and durably. Then its former hard links no longer
        share its content, and it may be changed. Raises OSError when it cannot be copied."""
        with self._parent(relative) as (folder, name):
            source = open_regular(name, os.O_RDONLY, folder)
            copy = f".saving-{name}.{os.urandom(6).hex()}"
            try:
                _copy_file(source, copy, folder)
                os.rename(copy, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(copy, dir_fd=folder)
                raise
            finally:
                os.close(source)

    @contextmanager
    def _parent(self, relative: str) -> Iterator[tuple[int, str]]:
        """Yield (descriptor, file name) for a file in the directory or below it: the descriptor is that of the
        directory in which the file lies, valid inside the `with` statement.

        Raises OSError, also for a symbolic link on the way.
        """
        *parents, name = relative.split("/")
        folder = self._fd
        try:
            for parent in parents:
                inner = os.open(parent, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                self._close_inner(folder)
                folder = inner
            yield folder, name
        finally:
            self._close_inner(folder)

    def _close_inner(self, folder: int) -> None:
        """Close the descriptor `folder` of a directory below this one; this directory's own descriptor stays open."""
        if folder != self._fd:
            os.close(folder)

    def nbytes(self, relative: str) -> int:
        """Return the size of a regular file in the directory, in bytes. Raises OSError, also for what is no regular
        file."""
        if "/" not in relative:
            found = os.stat(relative, dir_fd=self._fd, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                return found.st_size
        fd = self.open(relative)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def read(self, relative: str, limit: int) -> bytes:
        """Return all bytes of a file in the directory. Raises DamagedError when it cannot be read or has more than
        `limit` bytes.

        Raises ReplacedError instead when the file cannot be opened and the path does not lead to this directory any
        more.
        """
        where = str(self.path / relative)
        with self.opened(relative, where) as fd:
            return read_bounded(fd, limit, where)

    def read_at(self, relative: str, position: int, out: memoryview, where: str) -> None:
        """Fill `out` with the bytes of a file in the directory from byte `position` on. Raises DamagedError, whose
        message begins with `where`, when it cannot be read or is too short; ReplacedError as `read` does."""
        with self.opened(relative, where) as fd:
            read_fd(fd, position, out, where)

    @contextmanager
    def opened(self, relative: str, where: str) -> Iterator[int]:
        """Open a file in the directory as `open_named` does, yield its descriptor, and close it at the end of the
        `with` statement. Raises DamagedError also when closing fails."""
        fd = self.open_named(relative, where)
        try:
            yield fd
        finally:
            try:
                os.close(fd)
            except OSError as error:
                raise DamagedError(f"{where}: closing: {error.strerror or error}") from error

    def is_current(self) -> bool:
        """Return whether the directory's path still leads to it: it was not removed, and no other directory has its
        place."""
        try:
            now, own = os.stat(self.path), os.fstat(self._fd)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino)

    def require_current(self) -> None:
        """Raise ReplacedError when the path does not lead to this directory any more."""
        if not self.is_current():
            raise ReplacedError(f"{self.path} was replaced or removed while it was being read; open it again")

    @contextmanager
    def unreplaced(self) -> Iterator[None]:
        """Raise ReplacedError at the end of the `with` statement if the path does not lead to this directory any more,
        also in place of a CheckpointError raised inside; for reads by path."""
        try:
            yield
        except CheckpointError:
            self.require_current()
            raise
        self.require_current()

    def open_named(self, relative: str, where: str) -> int:
        """Open a regular file in the directory and return its descriptor, for the caller to close.

        If that fails, raises ReplacedError when the path does not lead to this directory any more, otherwise
        DamagedError, whose message begins with `where`.
        """
        try:
            return self.open(relative)
        except OSError as error:
            self.require_current()
            raise DamagedError(f"{where}: {error.strerror or error}") from error


def read_fd(fd: int, position: int, out: memoryview, where: str) -> None:
    """Fill `out` with the bytes of an open file from byte `position` on. Raises DamagedError, whose message begins with
    `where`, when it cannot be read or is too short."""
    try:
        while out:
            count = os.preadv(fd, [out], position)
            if count == 0:
                raise DamagedError(f"{where}: the file ends at byte {position}, before its data does")
            out, position = out[count:], position + count
    except OSError as error:
        raise DamagedError(f"{where}: reading at byte {position}: {error.strerror}") from error
