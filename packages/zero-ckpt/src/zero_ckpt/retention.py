"""Remove old checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .catalog import find_candidates
from .commit import remove_tree, set_for_removal
from .errors import CheckpointError
from .latest import read_latest
from .locking import root_lock


def prune(root: Path, *, keep_last: int, keep: Iterable[str] = (), dry_run: bool = False) -> list[Path]:
    """Remove all but the newest `keep_last` complete checkpoints of `root`, by step, and return the paths that they
    had, newest first.

    The tags in `keep` and the one that `latest` names always stay. Damaged checkpoints are neither counted nor removed.
    With `dry_run` nothing is removed, and the paths are only returned. Other jobs may save into the root and prune it
    at the same time. Raises CheckpointError when `keep_last` is less than 1 or the root stays locked for ten minutes,
    and DamagedError when `latest` cannot be read.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}, expected at least 1")
    with root_lock(root):
        kept = {*keep, read_latest(root)}
        complete = [candidate for candidate in find_candidates(root) if candidate.problem is None]
        to_remove = [candidate.path for candidate in complete[keep_last:] if candidate.tag not in kept]
        removed = [] if dry_run else [set_for_removal(path) for path in to_remove]
    for path in removed:
        remove_tree(path)
    return to_remove
