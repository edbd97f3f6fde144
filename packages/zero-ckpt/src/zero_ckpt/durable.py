"""Create small files and directories that are on disk when the call returns, and rename without replacing.

A file's content and its name in the directory reach the disk separately: a name is on disk once the directory is
synced. All functions raise OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_NO_FLAGS = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


def fsync_directory(path: Path) -> None:
    """Sync a directory: wait until the names of the files in it are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directories(path: Path) -> None:
    """Sync a directory and all directories below it: wait until the names in them are on disk."""
    for place, _, _ in os.walk(path):
        fsync_directory(Path(place))


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents, each of them on disk on return; does nothing if it is there."""
    if path.is_dir():
        return
    make_directories(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create a small file and wait until its content is on disk. Raises FileExistsError when `path` exists.

    Its name is on disk only after `fsync_directory`. `mode` is the file's permissions, before the umask.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def replace_durably(path: Path, data: bytes, mode: int = 0o666, *, overwrite: bool = True) -> None:
    """Write a small file and rename it to `path`, replacing that atomically; content and name are on disk on return.

    `mode` is the file's permissions, before the umask. On failure `path` is as it was. Raises FileExistsError when
    there is anything at `path`, unless `overwrite`.
    """
    temporary = path.with_name(f".saving-{path.name}.{os.urandom(6).hex()}")
    try:
        write_durably(temporary, data, mode)
        if overwrite:
            temporary.replace(path)
        else:
            rename_new(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or directory. Raises FileExistsError, with nothing changed, when there is anything at `target`.

    Where the file system cannot refuse by itself, what appears at `target` in the last moment is replaced.
    """
    if _rename(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def exchange(first: Path, second: Path) -> bool:
    """Give two files or directories each other's name, in one instant, and return True. Returns False, with nothing
    changed, where the file system cannot do that."""
    return _rename(first, second, _EXCHANGE)


def _rename(source: Path, target: Path, flags: int) -> bool:
    """Call renameat2 (Linux 3.15, glibc 2.28) with these `flags`, and return True. Returns False, with nothing changed,
    where the C library lacks the call or the file system does not know the flags."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_FLAGS:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
