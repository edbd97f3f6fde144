"""Finds and removes the files of extent stores whose process was killed, without touching a store that is in use.

A generation is the files that a store writes between two seals. Sealing writes the generation's index; the files of one
without an index are unsealed, and nobody can read them again.

`zero-launch doctor --swap FOLDER` finds this file by its entry point, `zero_launch.leftovers`.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ._lock_files import LockFile, missing_folders, read_record

__all__ = ["Leftover", "find", "remove_store", "report"]

_FILE = re.compile(r"(?P<prefix>.+)\.g(?P<generation>\d+)\.(?P<kind>s\d+\.extents|index|index\.part)")
# The stores in which a rank of zero-core swaps: each start makes them again, and a checkpoint has links of its own.
_SWAP = re.compile(r"(?:optimizer|parameters|activations|parked)\.rank\d+(?:-gradients)?")


@dataclass(frozen=True)
class Leftover:
    """The files of one store that nobody needs: the store's prefix, the paths, and the bytes of the drive that these
    files alone take. A file that a checkpoint has linked counts 0 bytes: its content stays under the other name.
    """

    prefix: str
    files: tuple[str, ...]
    nbytes: int


def find(folders: Sequence[str], *, remove: bool = False) -> list[Leftover]:
    """Return the files in ``folders`` that nobody needs, one `Leftover` for each store that has some; stores that a
    process has open are left out. ``folders``: all folders of the stores.

    Nobody needs unsealed generations; of a rank's swap (``optimizer``, ``parameters``, ``activations`` or ``parked``
    with ``.rank<N>``) nobody needs the sealed ones either. With ``remove`` these files are deleted; links that
    checkpoints have to them stay. The sealed generations of other stores stay, since a process may resume from them,
    also if the folder with their index is not in ``folders``; so do files without a lock file in any of the folders,
    which no store wrote. Raises OSError for a folder that cannot be read.
    """
    found = []
    for prefix in sorted(_files_by_store(folders)):
        lock = next((p for f in folders if os.path.isfile(p := os.path.join(f, f"{prefix}.lock"))), None)
        if lock is None:
            continue
        with _try_locked(lock) as ours:
            # Looked at again: until the lock was ours, the store may have been sealing.
            files = _unneeded_files(prefix, _files_by_store(folders).get(prefix, []), folders) if ours else []
            if not files:
                continue
            details = [os.lstat(path) for path in files]
            nbytes = sum(detail.st_blocks * 512 for detail in details if detail.st_nlink == 1)
            for path in files if remove else ():
                os.unlink(path)
            found.append(Leftover(prefix, tuple(files), nbytes))
    return found


def remove_store(folders: Sequence[str], prefix: str) -> list[str]:
    """Remove all files of the store named `prefix` from ``folders``, also the sealed ones and also if other folders of
    the store are missing; return their paths. Hard links elsewhere keep their content; the lock files stay. ExtentError
    if a process has the store open, OSError for a folder or file that cannot be used.
    """
    with ExitStack() as held:
        for folder in {os.path.realpath(folder) for folder in folders}:
            held.callback(LockFile(folder, prefix).give_back)
        found = sorted(_files_by_store(folders).get(prefix, []), key=lambda path: not path.endswith(".index"))
        for path in found:
            os.unlink(path)
        return found


def report(folders: Sequence[str], remove: bool) -> list[str]:
    """Run `find` and return a line of text per store, with its prefix, folder, number of files and bytes. With `remove`
    the files are deleted. Raises OSError as `find` does.
    """
    verb = "removed" if remove else "left by a killed process"
    return [
        f"{left.prefix} in {os.path.dirname(left.files[0])}: {len(left.files)} files, {left.nbytes} bytes, {verb}"
        for left in find(folders, remove=remove)
    ]


def _files_by_store(folders: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of each store's files in the folders, by the store's prefix; OSError for a folder that cannot be
    read.
    """
    stores: dict[str, list[str]] = {}
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _FILE.fullmatch(entry.name)
                if match is not None and entry.is_file(follow_symlinks=False):
                    stores.setdefault(match["prefix"], []).append(entry.path)
    return stores


def _unneeded_files(prefix: str, paths: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return those of the ``paths``, all files of the store named `prefix` in ``folders``, that nobody needs: of a
    rank's swap all of them, of another store those of unsealed generations. Indexes come first, since a generation
    without its index does not exist.
    """
    found = paths if _SWAP.fullmatch(prefix) else _files_without_index(prefix, paths, folders)
    return sorted(found, key=lambda path: not path.endswith(".index"))


def _files_without_index(prefix: str, paths: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return those of the ``paths``, all files of the store named `prefix` in ``folders``, whose generation has no
    index there. If other folders of the store are missing, in which the index may be, read-only files, which may be
    sealed, are left out.
    """
    parts = {path: _FILE.fullmatch(os.path.basename(path)) for path in paths}
    sealed = {match["generation"] for match in parts.values() if match is not None and match["kind"] == "index"}
    found = [path for path, match in parts.items() if match is not None and match["generation"] not in sealed]
    missing = missing_folders(prefix, {folder: read_record(folder, prefix) for folder in folders})
    return [path for path in found if not missing or os.lstat(path).st_mode & 0o222]


@contextmanager
def _try_locked(path: str) -> Iterator[bool]:
    """Return a context manager that tries, without waiting, to lock the store whose lock file is at `path`, and yields
    whether that succeeded. If so, no process can open the store inside its block. OSError if the lock file cannot be
    opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        ours = _try_lock(descriptor)
        try:
            yield ours
        finally:
            if ours:  # closing is not enough: a process that was forked meanwhile has the descriptor too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock the open file of a descriptor without waiting; return whether that succeeded."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
