"""Control groups that limit a process's memory (version 1 or 2, whichever this machine lets us make)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryGroup:
    """One control group; ``version`` 1 or 2."""

    path: Path
    version: int

    def limit(self, nbytes: int) -> None:
        """Kill what is in the group when it needs more than ``nbytes`` (of memory that cannot be reclaimed)."""
        (self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).write_text(str(nbytes))
        swap = self.path / ("memory.memsw.limit_in_bytes" if self.version == 1 else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(nbytes if self.version == 1 else 0))

    def command(self, *argv: str) -> list[str]:
        """``argv``, started inside the group."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *argv]


def anonymous_bytes(group: Path) -> int:
    """Memory in the group that no file backs: what a limit cannot take back."""
    rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(rows["rss"] if "rss" in rows else rows["anon"])


def peak_bytes(group: Path) -> int:
    """Most memory that was charged to the group so far, files it read included."""
    name = "memory.max_usage_in_bytes" if (group / "memory.max_usage_in_bytes").exists() else "memory.peak"
    return int((group / name).read_text())


def find_parent() -> tuple[Path, int]:
    """Where groups with a memory limit can be made; raises OSError with the reason when nowhere."""
    reasons = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        path = Path(where)
        if kind == "cgroup" and "memory" in options.split(","):
            version = 1
        elif kind == "cgroup2" and "memory" in (path / "cgroup.subtree_control").read_text().split():
            version = 2
        else:
            continue
        if os.access(path, os.W_OK):
            return path, version
        reasons.append(f"{where} is not writable")
    raise OSError("; ".join(reasons) or "no control group file system with a memory controller is mounted")


@contextmanager
def memory_groups(count: int) -> Iterator[list[MemoryGroup]]:
    """Make ``count`` groups and remove them at the end (everything in them must have ended)."""
    parent, version = find_parent()
    groups = [MemoryGroup(parent / f"zero-test-{os.getpid()}-{i}", version) for i in range(count)]
    made = []
    try:
        for group in groups:
            group.path.mkdir()
            made.append(group)
        yield groups
    finally:
        for group in made:
            group.path.rmdir()
