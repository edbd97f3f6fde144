"""Name the folder in which a node keeps a run's checkpoints in memory if nothing else names it, and find what other
runs have left there."""

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
    """Return the path of the folder in memory in which a node keeps checkpoints of one run of this user. ``run``: the
    absolute path of the run's checkpoints on disk, which tells it from other runs. Nothing is created."""
    return _BELOW / f"zero-{os.geteuid()}-{hashlib.sha256(os.fsencode(run)).hexdigest()[:16]}"


def warn_of_other_runs(folder: Path) -> None:
    """Log a warning that lists the folders beside ``folder`` in which other runs of this user left checkpoints in
    memory, and the bytes that these take. Does nothing unless ``folder`` was named by `node_memory_folder` or lies in
    such a folder."""
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
    """Return the total size in bytes of the files below ``folder``; files that disappear meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # a job that runs replaces its copies
                continue
    return total
