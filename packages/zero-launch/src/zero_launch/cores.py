"""Count the cores that the ranks have between them, and bind each rank to its own."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that this process may use: its affinity mask, capped by its control group's quota
    rounded up; at least 1. ``quota_file``: the group's `cpu.max`; no cap if it is missing."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()[:2]
    except OSError:  # no unified control groups here, or none of them limits this process
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, math.ceil(int(quota) / int(period))))


def threads_per_rank(nproc: int) -> int:
    """Return the number of OpenMP threads of each of ``nproc`` ranks on this host: an equal share of the cores that
    this process may use, at least 1."""
    return max(1, usable_cores() // nproc)


def warn_of_one_thread(threads: int, nproc: int, logger: logging.Logger) -> None:
    """Log a warning if a rank computes with one OpenMP thread because OMP_NUM_THREADS is 1, although its share of the
    cores is larger.

    ``threads``: that the rank has; ``nproc``: ranks of its host. Only the first rank of a host (LOCAL_RANK 0, or none)
    warns.
    """
    share = threads_per_rank(nproc)
    if threads > 1 or share == 1 or os.environ.get("OMP_NUM_THREADS") != "1" or int(os.environ.get("LOCAL_RANK", "0")):
        return
    logger.warning(
        "OMP_NUM_THREADS is 1, so the optimizer's update on the CPU uses 1 of this rank's %d cores. torchrun and "
        "Accelerate set it where the environment does not: set OMP_NUM_THREADS=%d, or start with zero-launch",
        *(share, share),
    )


def parse_cores(text: str) -> list[int]:
    """Return the cores of a list such as `1,3-5`: 1, 3, 4, 5. Raises ValueError for anything else, and for a core that
    is named twice."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"--bind_core_list {text!r}: expected numbers and ranges as in 0,2-5, got {part!r}")
        cores += range(int(first), int(last) + 1) if dash else [int(first)]
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        raise ValueError(f"--bind_core_list {text!r}: core {twice[0]} is named twice")
    return cores


def bindings(nproc: int, core_list: str = "", system: Path = _SYSTEM) -> list[tuple[int, ...]]:
    """Return the cores of each of ``nproc`` ranks: equally many for each, neighbours in the host's topology.

    Ranks are laid over the NUMA nodes in order; hyperthreads of one core stay together. When the nodes divide the ranks
    evenly, no rank spans two nodes. Cores that cannot be divided evenly are left out. ``core_list`` restricts the cores
    (see `parse_cores`); empty for all that this process may use. ``system``: the folder of the kernel that describes
    the host. Raises ValueError for a core that this process may not use, and when there are fewer cores than ranks.
    """
    usable = os.sched_getaffinity(0)
    wanted = set(parse_cores(core_list)) if core_list else set(usable)
    if not wanted <= usable:
        missing = ", ".join(map(str, sorted(wanted - usable)))
        raise ValueError(f"--bind_core_list {core_list!r}: this process may not use core {missing}")
    if len(wanted) < nproc:
        raise ValueError(f"{nproc} ranks cannot be bound to {len(wanted)} cores; start fewer ranks or bind none")
    nodes = [cores for node in _numa_nodes(system) if (cores := [c for c in node if c in wanted])]
    rest = sorted(wanted - {core for node in nodes for core in node})
    nodes += [rest] if rest else []
    ordered = [sorted(node, key=lambda core: (_siblings(core, system), core)) for node in nodes]
    if nproc % len(ordered) == 0 and all(len(node) >= nproc // len(ordered) for node in ordered):
        return [part for node in ordered for part in _equal_groups(node, nproc // len(ordered))]
    return _equal_groups([core for node in ordered for core in node], nproc)


def _equal_groups(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Return ``parts`` groups of equally many consecutive ``cores``; a remainder is left out."""
    size = len(cores) // parts
    return [tuple(cores[n * size : (n + 1) * size]) for n in range(parts)]


def _numa_nodes(system: Path) -> list[list[int]]:
    """Return the cores of each NUMA node, in the nodes' order; empty where the kernel names none. ``system``: the
    kernel's folder /sys/devices/system."""
    folders = sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:]))
    texts = [(folder / "cpulist").read_text().strip() for folder in folders]
    return [parse_cores(text) for text in texts if text]


def _siblings(core: int, system: Path) -> list[int]:
    """Return the hyperthreads of ``core``'s physical core in the kernel's order, as a sorting key; ``core`` alone if
    the kernel does not say. ``system``: the kernel's folder /sys/devices/system."""
    try:
        return parse_cores((system / f"cpu/cpu{core}/topology/thread_siblings_list").read_text().strip())
    except OSError:
        return [core]
