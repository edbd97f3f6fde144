"""Remarks about a job that makes no progress: which ranks have connected to the store (torch's TCPStore, at which they
meet), ended, or been stopped.

Nothing here ends a job, as a named rank may only be slow. Jobs that can never finish are found by the flight recorders
(desync.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

from zero_launch.desync import ranks_text

WAIT_SECONDS = 5.0
"""After so long without a further rank, those that came are said to wait."""
_LEFT_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_SLOW_LOOK_SECONDS = 10.0
_SLOW_AFTER_SECONDS = 60.0
_MOST_NAMES = 8


class Presence:
    """The last known state of all ranks of an attempt, and what was remarked about it.

    ``world_size``: number of ranks. ``where``: the address of their store, for remarks.
    """

    def __init__(self, world_size: int, where: str) -> None:
        self._world_size = world_size
        self._where = where
        self._arrived: set[int] = set()
        self._ended: set[int] = set()
        self._arrived_at = time.monotonic()
        self._ended_at = time.monotonic()
        self._reported_waiting = False
        self._reported_missing: set[int] = set()
        self._reported_ended: set[int] = set()

    def update(self, arrived: Iterable[int], ended: Iterable[int]) -> None:
        """Add the ranks that have connected to the store (``arrived``), and those that have ended with status 0
        (``ended``), to those known before."""
        now = time.monotonic()
        new, over = set(arrived) - self._arrived, set(ended) - self._ended
        if new:
            self._arrived |= new
            self._arrived_at, self._reported_waiting = now, False
        if over:
            self._ended |= over
            self._ended_at = now

    def remarks(self) -> list[str]:
        """Return the remarks to print now about ranks that have not connected or have ended; each is returned once.

        Empty while no rank that has connected still runs. Ranks that are late are remarked after 5 s without a new one.
        """
        now = time.monotonic()
        every = set(range(self._world_size))
        waiting = self._arrived - self._ended
        if not waiting:
            return []
        found = []
        missing = every - self._arrived
        never = (missing & self._ended) - self._reported_missing
        if never:
            self._reported_missing |= never
            found.append(
                f"{_short_ranks_text(never)} ended with exit status 0 without coming to {self._where}, where "
                f"{_short_ranks_text(waiting)} {_wait_verb(waiting)}"
            )
        late = missing - self._ended
        if late and not self._reported_waiting and now - self._arrived_at > WAIT_SECONDS:
            self._reported_waiting = True
            found.append(
                f"waiting for {len(late)} of {self._world_size} ranks at {self._where}: {_short_ranks_text(late)} "
                f"{'has' if len(late) == 1 else 'have'} not come"
            )
        left = (self._ended & self._arrived) - self._reported_ended
        if left and not missing and now - self._ended_at > _LEFT_SECONDS:
            self._reported_ended |= left
            found.append(
                f"{_short_ranks_text(left)} ended with exit status 0 while {_short_ranks_text(waiting)} still "
                f"{'runs' if len(waiting) == 1 else 'run'}"
            )
        return found


class HostPresence:
    """Finds out which ranks of this host have connected to the store at ``port``, and which are stopped (SIGSTOP).

    ``pids``: by rank. ``stopped_seconds``: how long a rank is stopped before that is remarked.
    """

    def __init__(self, pids: Mapping[int, int], port: int, stopped_seconds: float) -> None:
        self._pids = dict(pids)
        self._port = port
        self._stopped_seconds = stopped_seconds
        self._began_at = self._looked_at = time.monotonic()
        self._stopped_at: dict[int, float] = {}
        self._reported_stopped: set[int] = set()
        self.arrived: set[int] = set()

    def find_arrivals(self, ended: Collection[int], recorded: Collection[int]) -> bool:
        """Add to ``arrived`` the ranks that have connected since the last look, and return whether there are any.

        Looks at the processes once a second in the first minute, later every ten seconds, and no more once all have
        connected; calls between are cheap. ``ended``: ranks to skip. ``recorded``: ranks that have a flight record:
        they count as connected without a look.
        """
        new = (self._pids.keys() & set(recorded)) - self.arrived
        now = time.monotonic()
        pause = _LOOK_SECONDS if now - self._began_at < _SLOW_AFTER_SECONDS else _SLOW_LOOK_SECONDS
        absent = self._pids.keys() - self.arrived - new
        if absent and now - self._looked_at >= pause:
            self._looked_at = now
            new |= {rank for rank in absent - set(ended) if _connected(self._pids[rank], self._port)}
        self.arrived |= new
        return bool(new)

    def stopped(self) -> list[str]:
        """Return the remarks to print now about ranks that have been stopped (SIGSTOP) for long, or have been continued
        after such a remark; each is returned once."""
        now = time.monotonic()
        found = []
        for rank, pid in self._pids.items():
            if not _is_stopped(pid):
                self._stopped_at.pop(rank, None)
                if rank in self._reported_stopped:
                    self._reported_stopped.discard(rank)
                    found.append(f"rank {rank} continues")
                continue
            since = self._stopped_at.setdefault(rank, now)
            if rank not in self._reported_stopped and now - since >= self._stopped_seconds:
                self._reported_stopped.add(rank)
                found.append(
                    f"rank {rank} (pid {pid}) has been stopped for {now - since:.0f} s, as by SIGSTOP; others may wait "
                    f"for it, and `kill -CONT {pid}` lets it continue"
                )
        return found


def _short_ranks_text(ranks: Collection[int]) -> str:
    """Return ``ranks`` as text, `rank 3` or `ranks 1, 2`, with at most eight numbers and the count of the others."""
    named = sorted(ranks)
    more = f" and {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
    return ranks_text(named[:_MOST_NAMES]) + more


def _wait_verb(ranks: Collection[int]) -> str:
    """Return the verb for a sentence about ``ranks``: "waits" for one, "wait" for several."""
    return "waits" if len(ranks) == 1 else "wait"


def _connected(pid: int, port: int) -> bool:
    """Return whether the process ``pid`` has a TCP connection to ``port`` on any host; False if the process cannot be
    examined."""
    import psutil

    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_ESTABLISHED and c.raddr and c.raddr.port == port for c in connections)


def _is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by a signal or a debugger; False if there is none with that pid."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[:1] in (["T"], ["t"])
    except (FileNotFoundError, ProcessLookupError):
        return False
