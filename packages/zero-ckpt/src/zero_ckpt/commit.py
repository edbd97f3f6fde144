"""How a directory of files becomes a checkpoint in one instant, and how the remains of a dead save are found.

[Note: two-phase commit]
A save writes into `<root>/.saving-<tag>.<token>` and renames that directory to `<tag>` when every file in it, the
manifest last, is on disk. A tag that exists already is first renamed to `.replaced-<tag>.<token>`; if the process dies
between the two renames, readers use the replaced directory and the next save puts it back. Names that start with a
period are never taken for checkpoints. The saver holds an advisory lock on its directory, which the kernel drops when
it dies: a directory that nobody locks is stale and is swept by the next save into the same root. Creating, renaming
and sweeping happen under a lock on the root, so that several jobs may save into one root.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CheckpointError
from .manifest import MANIFEST_NAME

LATEST_NAME = "latest"
_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_LOCKLESS_STALE_SECONDS = 24 * 3600.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOSYS)

logger = logging.getLogger("zero_ckpt")


def is_tag(text: str) -> bool:
    """Whether `text` can name a checkpoint directory."""
    if not text or text.startswith(".") or "/" in text or "\0" in text:
        return False
    return text != LATEST_NAME and len(text.encode(errors="replace")) <= 200


def check_tag(tag: str) -> str:
    """`tag` itself when it can name a checkpoint directory; raises CheckpointError when it cannot."""
    if not is_tag(tag):
        raise CheckpointError(
            f"{tag!r} cannot be a tag: expected one path component of at most 200 bytes that does not start with a "
            f"period and is not {LATEST_NAME!r}"
        )
    return tag


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Create or overwrite a small file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class Staging:
    """The directory of a save in progress; create it with `Staging.create`, end it with `commit` or `discard`."""

    def __init__(self, root: Path, tag: str, token: str, lock_fd: int) -> None:
        self.root, self.tag, self.token = root, tag, token
        self.path = staging_path(root, tag, token)
        self._lock_fd = lock_fd
        self._ended = False

    @classmethod
    def create(cls, root: Path, tag: str, token: str) -> Staging:
        """Make and lock `<root>/.saving-<tag>.<token>`, creating `root` when needed."""
        root.mkdir(parents=True, exist_ok=True)
        path = staging_path(root, tag, token)
        with _root_lock(root):
            path.mkdir()
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            _try_lock(lock_fd)
        return cls(root, tag, token, lock_fd)

    def commit(self) -> Path:
        """Rename to `<root>/<tag>`, replacing an earlier checkpoint of that tag, and return that path.

        Every file in the directory must already be on disk.
        """
        target = self.root / self.tag
        replaced = self.root / f"{_REPLACED}{self.tag}.{self.token}"
        fsync_directory(self.path)
        with _root_lock(self.root):
            if target.exists():
                target.rename(replaced)
            self.path.rename(target)
            self._end()
            fsync_directory(self.root)
            if replaced.exists():
                remove_directory(replaced)
        return target

    def discard(self) -> None:
        """Remove the directory and all in it; nothing happens after a commit."""
        if not self._ended:
            try:
                with _root_lock(self.root):
                    remove_directory(self.path)
            except OSError as error:  # a rank may be writing still; the lock is given up, so the next save sweeps it
                logger.warning("left %s to be swept by the next save: %s", self.path, error)
            self._end()

    def _end(self) -> None:
        os.close(self._lock_fd)
        self._ended = True


def staging_path(root: Path, tag: str, token: str) -> Path:
    """Where the ranks of one save write."""
    return root / f"{_SAVING}{tag}.{token}"


def _try_lock(fd: int) -> bool | None:
    """True: locked now. False: somebody else holds it. None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


@contextmanager
def _root_lock(root: Path) -> Iterator[None]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(fd)


def sweep(root: Path) -> list[Path]:
    """Clear what dead saves and prunes left in `root`; returns what was removed or put back."""
    swept = []
    if root.is_dir():
        with _root_lock(root):
            swept = [result for path in sorted(root.iterdir()) if (result := _sweep_one(path)) is not None]
    for path in swept:
        logger.warning("swept %s, left by a save that did not finish", path)
    return swept


def _sweep_one(path: Path) -> Path | None:
    """What was removed or put back; what cannot be (another user's, say) is no reason not to save."""
    try:
        return _clear(path)
    except OSError as error:
        logger.warning("could not sweep %s: %s", path, error)
        return None


def _clear(path: Path) -> Path | None:
    if path.name.startswith(_REPLACED):
        return _settle_replaced(path)
    if path.name.startswith(_DELETING) or (path.name.startswith(_SAVING) and _is_stale(path)):
        if path.is_dir():
            remove_directory(path)
        else:
            path.unlink()
        return path
    return None


def _settle_replaced(path: Path) -> Path:
    target = path.parent / replaced_tag(path)
    if target.exists():
        remove_directory(path)
        return path
    path.rename(target)
    return target


def replaced_tag(path: Path) -> str:
    """The tag that `.replaced-<tag>.<token>` was."""
    return path.name[len(_REPLACED) :].rpartition(".")[0]


def replaced_directories(root: Path) -> list[Path]:
    """Checkpoints that were moved aside by a save that died before it could take their place."""
    return [path for path in root.glob(_REPLACED + "*") if not (root / replaced_tag(path)).exists()]


def _is_stale(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        locked = _try_lock(fd)
        age = time.time() - os.fstat(fd).st_mtime
    finally:
        os.close(fd)
    return locked is True or (locked is None and age > _LOCKLESS_STALE_SECONDS)


def remove_directory(path: Path) -> None:
    """Remove a directory tree; its name disappears at once, so that no reader sees half of it."""
    doomed = path
    if not path.name.startswith("."):
        doomed = path.parent / f"{_DELETING}{path.name}.{os.urandom(6).hex()}"
        path.rename(doomed)
    shutil.rmtree(doomed)


def write_latest(root: Path, tag: str) -> None:
    """Point `<root>/latest` at `tag`, atomically and durably."""
    temporary = staging_path(root, LATEST_NAME, os.urandom(6).hex())
    with _root_lock(root):
        try:
            write_durably(temporary, tag.encode())
            temporary.replace(root / LATEST_NAME)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(root)


def read_latest(root: Path) -> str | None:
    """The tag that `<root>/latest` names, or None when there is no such file."""
    try:
        text = (root / LATEST_NAME).read_bytes()[:4096]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return text.decode(errors="replace").strip()


def has_manifest(path: Path) -> bool:
    """Whether a directory holds a manifest, valid or not."""
    return (path / MANIFEST_NAME).is_file()


def list_tags(root: Path) -> list[str]:
    """Tags of the checkpoint directories in `root`, valid or not, sorted by name."""
    if not root.is_dir():
        return []
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".") and has_manifest(path))
