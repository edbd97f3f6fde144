"""Which checkpoints to keep."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .catalog import find_candidates
from .commit import read_latest, remove_directory
from .errors import CheckpointError


def prune(root: Path, *, keep_last: int, keep: Iterable[str] = (), dry_run: bool = False) -> list[Path]:
    """Remove all but the newest `keep_last` complete checkpoints of `root`, by step; returns what was removed.

    Those in `keep` and the one that `latest` names always stay. Damaged checkpoints are neither counted nor removed.
    """
    if keep_last < 1:
        raise CheckpointError(f"keep_last is {keep_last}, expected at least 1")
    kept = {*keep, read_latest(root)}
    complete = [candidate for candidate in find_candidates(root) if candidate.problem is None]
    doomed = [candidate.path for candidate in complete[keep_last:] if candidate.tag not in kept]
    if not dry_run:
        for path in doomed:
            remove_directory(path)
    return doomed
