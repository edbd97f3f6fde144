"""Read a byte range of a file, or give a sealed file a second name."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from .errors import DamagedError
from .opened import read_fd

_CLONE = 0x40049409
"""FICLONE: the new file shares the blocks of the old one until either changes (btrfs, XFS and others)."""
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_CLONE = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def read_at(path: Path, position: int, out: memoryview, where: str) -> None:
    """Fill `out` with the bytes of the file `path` from byte `position` on. Raises DamagedError, whose message begins
    with `where`, when the file cannot be read or is too short."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise DamagedError(f"{where}: {error.strerror}") from error
    try:
        read_fd(fd, position, out, where)
    finally:
        os.close(fd)


def share_file(source: Path, target: Path) -> bool:
    """Give the content of the file `source` a second name `target` without copying bytes, by a hard link or a clone of
    its blocks, and return True. Returns False, with nothing made, where the file system can do neither.

    The content is on disk after `sync_file(target)`, the name once the directory is synced. Raises OSError for any
    other failure (no such file, no space).
    """
    return _link(source, target) or _clone(source, target)


def sync_file(path: Path) -> None:
    """Wait until a file's content is on disk.

    Of many linked files, link all before the first call: then that one writes the data of all, and the others find
    nothing left to do.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to the file that `source` leads to, and return True. Returns False, with nothing made,
    where links between the two are not possible. Raises OSError for any other failure."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _clone(source: Path, target: Path) -> bool:
    """Make a read-only file `target` that shares the blocks of `source`, and return True. Returns False, with nothing
    made, where the file system cannot do that. Raises OSError for any other failure."""
    old = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        new = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            fcntl.ioctl(new, _CLONE, old)
        except OSError as error:
            target.unlink()
            if error.errno not in _NO_CLONE:
                raise
            return False
        finally:
            os.close(new)
    finally:
        os.close(old)
    return True
