"""Create small files and directories that are on disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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


def replace_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a small file and rename it to `path`, replacing that atomically; content and name are on disk on return.

    `mode` is the file's permissions, before the umask. On failure `path` is as it was.
    """
    temporary = path.with_name(f".saving-{path.name}.{os.urandom(6).hex()}")
    try:
        write_durably(temporary, data, mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)
