"""Make a directory of files a checkpoint in one instant, and find the remains of a save that died.

[Note: two-phase commit]
A save writes into `<root>/.saving-<tag>.<token>` and renames that directory to `<tag>` when every file in it, the
manifest last, is on disk. A tag that exists already exchanges names with it, in one instant, so that programs that know
nothing of this, as DeepSpeed, find the one or the other. Where the file system cannot exchange names, the old one is
first renamed to `.replaced-<tag>.<token>`; if the process dies before the second rename, readers use the replaced
directory and the next save puts it back. Names that start with a period are never taken for checkpoints; those without
the token of 12 hexadecimal digits are not this package's. The saver holds an advisory lock on its directory, which the
kernel drops when it dies: a directory that no process locks is stale and is swept by the next save into the same root.
Creating, renaming and sweeping happen under a lock on the root, so that several jobs may save into one root (see
[Note: locks and forks]). Directories are removed under a name of their own, after the lock was given up.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from .durable import exchange, fsync_directory, make_directories
from .errors import CheckpointError
from .latest import is_tag
from .locking import root_lock, try_lock, unlock_and_close
from .manifest import MAGIC, MANIFEST_NAME
from .opened import open_regular

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
_LOCKLESS_STALE_SECONDS = 24 * 3600.0
_REMAINS = re.compile(r"\.(saving|replaced|deleting)-.+\.[0-9a-f]{12}", re.DOTALL)
_DATA_FILE = re.compile(r"rank-\d{5}(-\d{4})?\.(safetensors|extents)")

logger = logging.getLogger("zero_ckpt")


class Staging:
    """The directory of a save in progress, which ends with `commit` or `discard`; make one with `Staging.create`.

    The checkpoint is to become `<root>/<tag>`; `token` tells this save from others. `lock_fd` is a descriptor of the
    directory, which holds its lock. `judge` is called with a path and raises CheckpointError if what is there must not
    be replaced.
    """

    def __init__(self, root: Path, tag: str, token: str, lock_fd: int, judge: Callable[[Path], None]) -> None:
        self.root, self.tag, self.token = root, tag, token
        self._require_replaceable = judge
        self.path = staging_path(root, tag, token)
        self._lock_fd = lock_fd
        self._ended = False

    @classmethod
    def create(cls, root: Path, tag: str, token: str, judge: Callable[[Path], None] | None = None) -> Staging:
        """Make and lock `<root>/.saving-<tag>.<token>`, creating `root` when needed; `token` is 12 hexadecimal digits.

        `judge` is called with `<root>/<tag>`, and raises CheckpointError if what is there must not be replaced; by
        default `require_replaceable`. Also raises CheckpointError when the root stays locked for ten minutes, and
        OSError when the directory cannot be made.
        """
        judge = judge or require_replaceable
        make_directories(root)
        path = staging_path(root, tag, token)
        with ExitStack() as if_failed:
            with root_lock(root):
                judge(root / tag)
                path.mkdir()
                lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if_failed.callback(unlock_and_close, lock_fd)  # so that the next save sweeps the directory
                try_lock(lock_fd)
            if_failed.pop_all()
        return cls(root, tag, token, lock_fd, judge)

    def commit(self, *, replace_existing: bool = True) -> Path:
        """Rename the directory to `<root>/<tag>`, replacing and removing an earlier checkpoint of that tag, and return
        that path.

        Every file in the directory must be on disk before the call; the new name is on disk when it returns. The lock
        on the directory is released. Raises CheckpointError when `<root>/<tag>` is something that must not be replaced,
        when anything is there and `replace_existing` is False, and when the root stays locked for ten minutes.
        """
        target = self.root / self.tag
        old = self.path
        fsync_directory(self.path)
        with root_lock(self.root):
            if exists(target):
                if not replace_existing:
                    raise CheckpointError(f"{target} exists and is not replaced; save under another tag")
                self._require_replaceable(target)
                if not exchange(self.path, target):
                    old = self.root / f"{_REPLACED}{self.tag}.{self.token}"
                    target.rename(old)
                    self.path.rename(target)
            else:
                self.path.rename(target)
            self._end()
            fsync_directory(self.root)
            to_remove = set_for_removal(old) if exists(old) else None
        if to_remove is not None:
            remove_tree(to_remove)
        return target

    def discard(self) -> None:
        """Remove the directory and everything in it; does nothing after a commit. If it cannot be removed, that is
        logged and the next save sweeps it."""
        if self._ended:
            return
        try:
            with root_lock(self.root):
                to_remove = set_for_removal(self.path) if exists(self.path) else None
            if to_remove is not None:
                remove_tree(to_remove)
        except (OSError, CheckpointError) as error:  # a rank may be writing still; the next save sweeps it
            logger.warning("left %s to be swept by the next save: %s", self.path, error)
        self._end()

    def _end(self) -> None:
        """Release the directory's lock and close its descriptor; from now on `discard` does nothing."""
        self._ended = True
        unlock_and_close(self._lock_fd)


def require_replaceable(target: Path) -> None:
    """Raise CheckpointError unless `target` does not exist, or is an empty directory or a checkpoint.

    A directory whose manifest does not begin with the format's mark (see `has_mark`) counts as a checkpoint only when
    every name in it is one that a save writes: anything else may be a user's own.
    """
    if not exists(target):
        return
    if target.is_dir() and not target.is_symlink():
        if has_mark(target):
            return
        names = [entry.name for entry in target.iterdir()]
        others = [name for name in names if not is_data_file(name)]
        if not others or (others == [MANIFEST_NAME] and len(names) > 1):
            return
    raise CheckpointError(
        f"{target} exists and is no checkpoint, so it is not replaced; save under another tag, or move it away"
    )


def exists(path: Path) -> bool:
    """Return whether there is anything at `path`; true also for a dangling link."""
    return os.path.lexists(path)


def staging_path(root: Path, tag: str, token: str) -> Path:
    """Return the path of the directory into which the ranks of one save write, `<root>/.saving-<tag>.<token>`; `token`
    is 12 hexadecimal digits, the same on all ranks."""
    return root / f"{_SAVING}{tag}.{token}"


def sweep(root: Path, *, dry_run: bool = False) -> list[Path]:
    """Put back or remove what interrupted saves and prunes left in `root`, and return the paths where that lay.

    A checkpoint that was moved aside gets its name back; unfinished and half-removed ones are removed. Directories of
    running saves are left. Every path is logged, also one that cannot be removed. With `dry_run` nothing is changed,
    and the paths are only returned. Returns an empty list for a root that does not exist. Holds the root's lock
    meanwhile, and raises CheckpointError when it is not free within ten minutes.
    """
    if not root.is_dir():
        return []
    swept, to_remove = [], []
    with root_lock(root):
        for path in sorted(root.iterdir()):
            what = _sweep_action(path)
            if what is not None:
                swept.append(path)
                if not dry_run:
                    to_remove += _put_back_or_set_for_removal(path, what)
    for path in to_remove:
        _try_remove(path)
    for path in [] if dry_run else swept:
        logger.warning("swept %s, left by a save that did not finish", path)
    return swept


def _sweep_action(path: Path) -> str | None:
    """Return what a sweep does with `path`: "remove", "put back", or None to leave it alone.

    None is for names that no save gives, the directory of a running save, a directory that holds directories, and what
    cannot be examined; the last two are logged.
    """
    if not is_remains(path):
        return None
    try:
        if path.name.startswith(_REPLACED) and not exists(path.parent / replaced_tag(path)):
            return "put back"
        if path.name.startswith(_SAVING) and not _is_stale(path):
            return None
        if not _is_flat(path):
            logger.warning("left %s: it holds folders, which no checkpoint does; move it away or remove it", path)
            return None
        return "remove"
    except OSError as error:
        logger.warning("could not sweep %s: %s", path, error)
    return None


def is_remains(path: Path) -> bool:
    """Return whether `path` has a name that an unfinished save or removal leaves: it begins with `.saving-`,
    `.replaced-` or `.deleting-` and ends with a token."""
    return _REMAINS.fullmatch(path.name) is not None


def _is_flat(path: Path) -> bool:
    """Return whether `path` is no directory, or a directory without directories in it, as every checkpoint is; links
    count as files."""
    if path.is_symlink() or not path.is_dir():
        return True
    return not any(entry.is_dir() and not entry.is_symlink() for entry in path.iterdir())


def _put_back_or_set_for_removal(path: Path, what: str) -> list[Path]:
    """Put `path` back or rename it for removal, as `what` says, a result of `_sweep_action`.

    Returns a list of the new path if it is now to be removed, else an empty list. An OSError is logged and not raised.
    """
    try:
        if what == "put back":
            path.rename(path.parent / replaced_tag(path))
            return []
        return [path if path.name.startswith(_DELETING) else set_for_removal(path)]
    except OSError as error:
        logger.warning("could not sweep %s: %s", path, error)
        return []


def _try_remove(path: Path) -> None:
    """Remove a file or a directory tree; an OSError (for another user's file, say) is logged and not raised."""
    try:
        remove_tree(path)
    except OSError as error:
        logger.warning("could not sweep %s: %s", path, error)


def replaced_tag(path: Path) -> str:
    """Return the tag in a path whose name is `.replaced-<tag>.<token>`."""
    return path.name[len(_REPLACED) :].rpartition(".")[0]


def tag_of(path: Path) -> str:
    """Return the tag of a checkpoint directory by its name, also of one that a save moved aside to
    `.replaced-<tag>.<token>`."""
    return replaced_tag(path) if path.name.startswith(_REPLACED) else path.name


def replaced_path(root: Path, tag: str) -> Path:
    """Return a new path in `root`, `.replaced-<tag>.<token>`, for moving the checkpoint `tag` aside; if it stays there,
    a sweep puts it back."""
    return root / f"{_REPLACED}{tag}.{os.urandom(6).hex()}"


def replaced_directories(root: Path) -> list[Path]:
    """Return the checkpoints in `root` that an interrupted save left moved aside, with nothing under their own name."""
    found = (path for path in root.glob(_REPLACED + "*") if is_remains(path))
    return [path for path in found if not exists(root / replaced_tag(path))]


def _is_stale(path: Path) -> bool:
    """Return whether no running save owns `path`: no process locks it, or, where the file system has no locks, it was
    not modified for a day.

    Links, and what is neither directory nor file, are always stale. Raises OSError when `path` cannot be opened.
    """
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        return True
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        age = time.time() - os.fstat(fd).st_mtime
        locked = try_lock(fd)
    finally:
        unlock_and_close(fd)
    return locked is True or (locked is None and age > _LOCKLESS_STALE_SECONDS)


def set_for_removal(path: Path) -> Path:
    """Rename a directory to a new hidden name, `.deleting-...`, so that no reader finds half of it while `remove_tree`
    removes it. Returns the new path."""
    to_remove = path.parent / f"{_DELETING}{path.name.lstrip('.')}.{os.urandom(6).hex()}"
    path.rename(to_remove)
    return to_remove


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a directory tree; does nothing if there is none. Other processes may remove it at the
    same time. Raises OSError when something in it cannot be removed."""
    while exists(path):
        try:
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)
        except FileNotFoundError:  # another process was faster
            continue


def remove_directory(path: Path) -> None:
    """Remove a directory tree. If its name does not begin with a period, it is first renamed to a hidden name, so that
    no reader sees half of it."""
    remove_tree(path if path.name.startswith(".") else set_for_removal(path))


def has_manifest(path: Path) -> bool:
    """Return whether a directory holds a manifest, valid or not."""
    return exists(path / MANIFEST_NAME)


def is_data_file(name: str) -> bool:
    """Return whether `name` has the form of a rank's data file in a checkpoint, such as `rank-00003.safetensors`."""
    return _DATA_FILE.fullmatch(name) is not None


def has_mark(path: Path) -> bool:
    """Return whether the manifest in a directory begins with the mark of this format, its first bytes in any version;
    False if it cannot be read."""
    try:
        fd = open_regular(path / MANIFEST_NAME)
        try:
            return os.pread(fd, len(MAGIC), 0)[:-1] == MAGIC[:-1]
        finally:
            os.close(fd)
    except OSError:
        return False


def holds_checkpoint(path: Path) -> bool:
    """Return whether a checkpoint was written into `path`, whole or not: its manifest begins with the format's mark, or
    it holds ranks' data files.

    False if `path` is no directory or cannot be listed.
    """
    if has_mark(path):
        return True
    try:
        return any(is_data_file(name) for name in os.listdir(path))
    except OSError:
        return False


def is_checkpoint_directory(path: Path) -> bool:
    """Return whether `path` was written as a checkpoint (see `holds_checkpoint`) and is no link."""
    return not os.path.islink(path) and holds_checkpoint(path)


def checkpoint_directories(root: Path) -> list[Path]:
    """Return the directories in `root` into which a checkpoint was written, whole or not, sorted by name; an empty list
    if `root` is no directory.

    Links, and names that cannot be a tag, such as those that an unfinished save leaves, are left out. Raises OSError
    when `root` cannot be listed.
    """
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir()) if is_tag(path.name) and is_checkpoint_directory(path)]


def is_root(directory: Path) -> bool:
    """Return whether `directory` holds a checkpoint, whole or not, or the remains of an interrupted save. Raises
    OSError when it cannot be listed."""
    return bool(checkpoint_directories(directory)) or any(is_remains(path) for path in directory.iterdir())


def roots_below(directory: Path) -> list[str]:
    """Return the sorted names of the folders in `directory` that are roots (see `is_root`). Folders that cannot be
    listed are left out; the list is empty if `directory` cannot be."""
    try:
        return [path.name for path in sorted(directory.iterdir()) if _is_readable_root(path)]
    except OSError:
        return []


def _is_readable_root(path: Path) -> bool:
    """Return whether `path` is a folder that can be listed and is a root."""
    try:
        return path.is_dir() and is_root(path)
    except OSError:  # such as lost+found, which is another user's
        return False


def list_tags(root: Path) -> list[str]:
    """Return the tags of the directories in `root` that have a manifest, valid or not, sorted; raises OSError when
    `root` cannot be listed.
    """
    return [path.name for path in checkpoint_directories(root) if has_manifest(path)]
