"""Where a node keeps a run's checkpoints in memory if nothing names a folder, and what other runs have left there."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

logger = logging.getLogger("zero_ckpt")

_BELOW = Path("/dev/shm")
_NAME = re.compile(r"(zero-\d+-)[0-9a-f]{16}")


def node_memory_folder(run: str) -> Path:
    """Return the folder in which a node keeps this user's checkpoints in memory of the run whose checkpoints on disk
    are in ``run``, an absolute path. Creates nothing."""
    return _BELOW / f"zero-{os.geteuid()}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:16]}"


def warn_of_other_runs(folder: Path) -> None:
    """Log the folders beside ``folder`` that `node_memory_folder` has named for other runs of this user, and how many
    bytes they take of the node's memory. Does nothing where ``folder`` is not named by it."""
    named = next((path for path in (folder, *folder.parents) if _NAME.fullmatch(path.name)), None)
    if named is None:
        return
    mine = named.name.rpartition("-")[0]
    others = [path for path in sorted(named.parent.glob(f"{mine}-*")) if path != named and _NAME.fullmatch(path.name)]
    if others:
        logger.warning(
            "checkpoints in memory of other runs take %.1f MiB of this node's memory; remove those that no job resumes "
            "from: %s",
            *(sum(map(_bytes_below, others)) / 2**20, ", ".join(map(str, others))),
        )


def _bytes_below(folder: Path) -> int:
    """Return the bytes of the files below ``folder``; files that go meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # a job that runs replaces its copies
                continue
    return total
