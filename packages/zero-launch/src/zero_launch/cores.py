"""How many cores the ranks have between them."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity mask, capped by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()[:2]
    except OSError:  # no unified control groups here, or none of them limits this process
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_per_rank(nproc: int) -> int:
    """OpenMP threads for each of ``nproc`` ranks, so that together they fill the cores without crowding them."""
    return max(1, usable_cores() // nproc)
