"""Removal of stores that no process will open again: those of ranks that a job no longer has."""

from __future__ import annotations

import os
from collections.abc import Callable

from ._extents import open_extents
from .errors import OffloadError
from .swap_paths import NvmePath, SwapPaths, swap_paths

__all__ = ["remove_stores"]


def remove_stores(path: NvmePath, gone: Callable[[str], bool]) -> list[str]:
    """Remove every store in the folders of ``path`` for whose prefix ``gone`` returns True; return the removed
    prefixes.

    A store that a process has open, or that cannot be opened, stays; a prefix of which only the lock file is left is no
    store, and lock files stay. The links that checkpoints have to its files stay valid. Raises OffloadError for folders
    that cannot be read.
    """
    folders = swap_paths(path).folders
    unmeasured = SwapPaths(folders, (1.0,) * len(folders))
    try:
        names = {
            entry.name for folder in folders for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)
        }
    except OSError as error:
        raise OffloadError(f"cannot look for swap files in {', '.join(folders)}: {error}") from error
    removed = []
    for prefix in sorted({name.removesuffix(".lock") for name in names if name.endswith(".lock")}):
        if not gone(prefix) or not any(name.startswith(f"{prefix}.g") for name in names):
            continue
        try:
            store = open_extents(unmeasured, prefix=prefix, checksums=False, verify=False)
        except OffloadError:  # in use
            continue
        store.close(remove=True)
        removed.append(prefix)
    return removed
