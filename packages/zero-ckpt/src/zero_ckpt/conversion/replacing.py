"""Replace a directory by another, so that a process that dies loses neither.

[Note: replaced directories]
The new directory is complete and on disk before the old one is touched. Then the two exchange names, in one instant.
Where the file system cannot do that, the old one is moved aside to `.replaced-<name>.<token>` first; when the process
dies before the new one has its name, the next call of `recover`, and the next save into the same root, puts it back.
"""

from __future__ import annotations

from pathlib import Path

from ..commit import exists, is_remains, remove_tree, replaced_path, replaced_tag, set_for_removal
from ..durable import exchange, fsync_directory
from ..locking import root_lock


def put_in_place(directory: Path, target: Path) -> None:
    """Rename `directory` to `target`, in the same folder. If there is a directory `target` already, that gets the name
    of `directory`.

    The names are on disk on return. The caller holds the lock of the folder. Raises OSError, with both names as before.
    """
    if not exists(target):
        directory.rename(target)
    elif not exchange(directory, target):
        aside = replaced_path(target.parent, target.name)
        target.rename(aside)
        try:
            directory.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        aside.rename(directory)
    fsync_directory(target.parent)


def recover(root: Path, name: str) -> None:
    """Put back the directory `name` of the folder `root` if a process moved it aside and died before the new one had
    its name; if the new one has its name, remove the old one. Does nothing where `root` is no folder."""
    if not root.is_dir():
        return
    with root_lock(root):
        for path in root.glob(".replaced-*"):
            if not is_remains(path) or replaced_tag(path) != name:
                continue
            if exists(root / name):
                remove_tree(set_for_removal(path))
            else:
                path.rename(root / name)
