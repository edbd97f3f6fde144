"""Preflight checks: compare all needs with the limits before anything is allocated, so that a job is refused, not
killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import BudgetError
from .limits import Limit, disk_limit, locked_limits, memory_limits, shared_limits

__all__ = ["Demand", "HostBudget", "Resource"]

Resource = Literal["memory", "locked", "shared", "disk"]
_RESERVE = 256 << 20
_TITLES = {
    "memory": "host memory",
    "locked": "locked memory",
    "shared": "shared memory",
}
_ADVICE = {
    "memory": 'use tier="nvme", a smaller sub_group_size or fewer buffers, or raise the limit',
    "locked": "raise it with `ulimit -l`, or do without locked memory",
    "shared": "enlarge /dev/shm (in a container: --shm-size)",
    "disk": "free some space or name another path",
}


@dataclass(frozen=True)
class Demand:
    """``nbytes`` of a resource for a purpose; ``path`` for disk space."""

    purpose: str
    nbytes: int
    resource: Resource
    path: str | None = None


class HostBudget:
    """Collects the needs of this process and compares them with its limits.

    Limits are those of cgroups v1 and v2 (all groups above the process), MemAvailable, RLIMIT_DATA and RLIMIT_AS for
    ``memory``; RLIMIT_MEMLOCK for ``locked``; /dev/shm for ``shared``; the free space of each file system for ``disk``.
    ``reserve_bytes`` of memory stay free, by default 256 MiB, but at most a quarter of the free memory (a small cgroup
    has no room for more). ``limits`` replaces the limits read from the system.

    ``processes`` on this host have the same needs at the same time: each gets an equal share of the limits they have in
    common. ``barrier`` is called in `check` once the limits are read, so that no process allocates before all have read
    them.
    """

    def __init__(
        self,
        *,
        reserve_bytes: int | None = None,
        limits: Mapping[Resource, Sequence[Limit]] | None = None,
        processes: int = 1,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        if processes < 1:
            raise ValueError(f"processes: expected 1 or more, got {processes}")
        self.reserve_bytes = reserve_bytes
        self.processes = processes
        self._barrier = barrier
        self._given = limits
        self._needs: list[Demand] = []

    @property
    def needs(self) -> tuple[Demand, ...]:
        """Return the needs added so far."""
        return tuple(self._needs)

    def need(self, purpose: str, nbytes: int, resource: Resource = "memory", *, path: str | None = None) -> None:
        """Add a need of ``nbytes`` of a resource; ``purpose`` names it in tables. ``path`` (a folder, which may not
        exist yet) is required for ``disk`` and refused otherwise. ValueError for an unknown resource, negative bytes,
        or a path where none belongs.
        """
        if resource not in _ADVICE:
            raise ValueError(f"resource: expected one of {', '.join(_ADVICE)}, got {resource!r}")
        if nbytes < 0:
            raise ValueError(f"{purpose}: expected 0 or more bytes, got {nbytes}")
        if (path is None) == (resource == "disk"):
            raise ValueError(f"{purpose}: a path belongs to disk space and to nothing else, got path={path!r}")
        self._needs.append(Demand(purpose, nbytes, resource, path))

    def copy(self) -> HostBudget:
        """Return another budget with the same limits and needs, to try out what would fit. It has no ``barrier``."""
        made = HostBudget(reserve_bytes=self.reserve_bytes, limits=self._given, processes=self.processes)
        made._needs = list(self._needs)
        return made

    def check(self) -> None:
        """Raise BudgetError, with the table, if the needs of any resource exceed its limit. ``barrier`` is called
        before that, whatever the result.
        """
        totals = self._totals()
        short = [(title, advice) for title, advice, needed, limit in totals if needed > limit.free]
        if self._barrier is not None:
            self._barrier()
        if short:
            table = self._table(totals)
            told = "; ".join(f"{title}: {advice}" for title, advice in short)
            raise BudgetError(f"this does not fit here:\n{table}\n{told}", table)

    def table(self) -> str:
        """Return the needs, their sum and the current limit of each resource as text, one per line; empty without
        needs.
        """
        return self._table(self._totals())

    def _table(self, totals: Sequence[tuple[str, str, int, Limit]]) -> str:
        """Return the needs, their sum and the limit of each resource as text, one per line; ``totals``: as `_totals`
        returned them.
        """
        rows: list[tuple[str, str, str]] = []
        for title, _, needed, limit in totals:
            for need in self._needs:
                if self._title(need) == title:
                    rows.append((title, need.purpose, _format_bytes(need.nbytes)))
            verdict = "" if needed <= limit.free else f"   short of {_format_bytes(needed - limit.free)}"
            rows.append((title, "needed together", _format_bytes(needed)))
            rows.append((title, f"allowed by {limit.source}", _format_bytes(limit.free) + verdict))
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)

    def free(self, resource: Resource, *, path: str | None = None) -> Limit:
        """Return this process's share of the tightest current limit on a resource, less the reserve, which applies to
        ``memory`` only; a limit of 2**62 bytes if there is none. ``path``: the folder, for ``disk``.
        """
        if self._given is not None and resource in self._given:
            found = list(self._given[resource])
        elif resource == "disk":
            found = [disk_limit(str(path))]
        elif resource == "memory":
            found = memory_limits()
        else:
            found = locked_limits() if resource == "locked" else shared_limits()
        if not found:
            return Limit("no limit", 1 << 62)
        return min((self._share(limit, resource) for limit in found), key=lambda limit: limit.free)

    def _share(self, limit: Limit, resource: Resource) -> Limit:
        """Return the limit less the reserve (``memory`` only), divided among the processes that share it; the new
        limit's ``source`` says so.
        """
        source, free = limit.source, limit.free
        reserve = 0
        if resource == "memory":
            reserve = min(_RESERVE, free // 4) if self.reserve_bytes is None else self.reserve_bytes
        if reserve:
            source, free = f"{source} less {_format_bytes(reserve)} kept free", max(0, free - reserve)
        if self.processes > 1 and not limit.own:
            source, free = f"{source}, shared by {self.processes} processes", free // self.processes
        return Limit(source, free, limit.own)

    def _totals(self) -> list[tuple[str, str, int, Limit]]:
        """Return (title, advice, bytes needed, tightest limit) of each resource that is needed, one per file system for
        ``disk``; reads the current limits. The advice says what to do if the limit is too low.
        """
        groups: dict[str, list[Demand]] = {}
        for need in self._needs:
            groups.setdefault(self._title(need), []).append(need)
        return [
            (
                title,
                _ADVICE[needs[0].resource],
                sum(n.nbytes for n in needs),
                self.free(needs[0].resource, path=needs[0].path),
            )
            for title, needs in groups.items()
        ]

    def _title(self, need: Demand) -> str:
        """Return the heading under which the table lists a need: that of its resource, with the mount point for disk
        space.
        """
        if need.resource != "disk":
            return _TITLES[need.resource]
        return f"disk of {_mount_point(str(need.path))}"


def _mount_point(path: str) -> str:
    """Return the mount point of the file system on which ``path`` is, or will be once it is made."""
    folder = os.path.realpath(path)
    while not os.path.ismount(folder):
        folder = os.path.dirname(folder)
    return folder


def _format_bytes(count: int) -> str:
    """Return a count of bytes as text: rounded, with a binary unit, and the exact count in brackets."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit} ({count} bytes)"
    return f"{count} bytes"
