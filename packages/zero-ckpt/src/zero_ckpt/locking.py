"""Advisory locks on files and directories, which the kernel drops when the process that holds them dies.

[Note: locks and forks]
A process that forks while it holds a lock shares the lock with its child: closing the descriptor in the parent leaves
it with the child, for as long as that lives (a worker of a data loader, say). So every lock is released with LOCK_UN,
which ends it for all copies of the descriptor. One case remains: a holder that was killed while a child of its own
lives. A process that waits for the root's lock therefore logs the holders after a while, and raises an error instead of
waiting for ever.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOSYS)
"""Errors of a file system without locks."""
_SPEAK_AFTER_SECONDS = 5.0
_GIVE_UP_AFTER_SECONDS = 600.0

logger = logging.getLogger("zero_ckpt")


def try_lock(fd: int) -> bool | None:
    """Lock what a descriptor refers to, for this process alone, without waiting.

    Returns True when it is locked now, False when another holds the lock, None where the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def open_locked(path: Path) -> int:
    """Open the regular file at `path`, creating it if it is missing, lock it for this process and return its
    descriptor. Where the file system has no locks, the file is only opened.

    Raises CheckpointError when another process holds the lock or `path` is no regular file, and OSError for a symbolic
    link.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{path} is no regular file; remove it")
            if try_lock(fd) is False:
                raise CheckpointError(f"{path} is being written by another process")
            if is_at(fd, path):
                return fd
        except BaseException:
            unlock_and_close(fd)
            raise
        unlock_and_close(fd)  # it was renamed or removed before it could be locked


def is_at(fd: int, path: Path) -> bool:
    """Return whether the file that is open as `fd` is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def unlock_and_close(fd: int) -> None:
    """Release the lock on an open file, if there is one, and close `fd`. The lock ends even if a child process has
    inherited a copy of the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(fd)


@contextmanager
def root_lock(root: Path) -> Iterator[None]:
    """Hold the lock of the directory `root` while the `with` statement runs; only for short steps. Where its file
    system has no locks, nothing is held.

    `root` is a directory that holds checkpoints. Raises CheckpointError after waiting for the lock for ten minutes. Do
    not nest it: a second lock of the same root in this process waits for the first.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        wait_for_lock(fd, root)
        yield
    finally:
        unlock_and_close(fd)


def wait_for_lock(fd: int, root: Path) -> None:
    """Lock `fd`, the open file or directory `root`; wait while another process holds its lock. Return without a lock
    where the file system has none.

    Logs a warning after 5 s of waiting, and raises CheckpointError after ten minutes.
    """
    begin, pause, said = time.monotonic(), 0.001, False
    while try_lock(fd) is False:
        waited = time.monotonic() - begin
        if waited > _GIVE_UP_AFTER_SECONDS:
            raise CheckpointError(
                f"{root} is locked by {_holders(fd)} for more than {waited:.0f} s; end that process (or the children "
                "that it left), then save again"
            )
        if waited > _SPEAK_AFTER_SECONDS and not said:
            logger.warning("waiting for the lock of %s, which %s holds", root, _holders(fd))
            said = True
        time.sleep(pause)
        pause = min(pause * 2, 0.1)


def _holders(fd: int) -> str:
    """Return words for a message that name the processes that hold the lock on `fd`, such as `process 12, 40`, as far
    as /proc/locks of this host knows them."""
    inode = str(os.fstat(fd).st_ino)
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        lines = []
    pids = [line[4] for line in lines if len(line) > 5 and line[1] == "FLOCK" and line[5].rpartition(":")[2] == inode]
    return f"process {', '.join(pids)}" if pids else "a process that is not known on this host"
