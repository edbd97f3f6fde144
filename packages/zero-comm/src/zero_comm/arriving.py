"""Wait for the ranks of a job to come to its store, and log after a while which of them are missing.

The store is the key-value server, kept by rank 0 or by the launcher, through which torch's process groups are made. A
place is the `RankEnvironment` of this process: its rank, and where the store listens.
"""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from .discovery import RankEnvironment
from .errors import PeerError

_SPEAK_AFTER_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 0.25
_MOST_NAMES = 8

logger = logging.getLogger("zero_comm")


def await_store(address: str, place: RankEnvironment, timeout: timedelta) -> None:
    """Return once something listens at ``address`` and the port of ``place``; after 5 s log once that this rank waits
    for it. ``place``: this process's rank environment.

    Raises PeerError after ``timeout``. Sends nothing.
    """
    began, pause, said = time.monotonic(), 0.01, False
    while True:
        try:
            socket.create_connection((address, place.port), timeout=_SPEAK_AFTER_SECONDS).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waited = time.monotonic() - began
        where = f"rank 0 of {place.world_size} ranks at {address}:{place.port}, where nothing answers ({reason})"
        if waited >= timeout.total_seconds():
            raise PeerError(f"rank {place.rank} waited {waited:.0f} s for {where}")
        if waited >= _SPEAK_AFTER_SECONDS and not said:
            logger.warning("rank %d is waiting for %s", place.rank, where)
            said = True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def await_ranks(store: Store, address: str, place: RankEnvironment, timeout: timedelta) -> None:
    """Return once all ranks have called this with ``store``; after 5 s the lowest rank that has come logs, once, which
    ranks have not.

    Every rank must call it equally often. ``address``: of the store. ``place``: this process's rank environment. Raises
    PeerError after ``timeout``, and when the process that keeps the store is gone.
    """
    where = f"{place.world_size} ranks at {address}:{place.port}"
    try:
        number = store.add(f"zero-comm/came/{place.rank}", 1)  # of a process's calls: it may destroy its groups
        here = f"zero-comm/here/{number}"
        store.add(here, 1)
        began, pause, said = time.monotonic(), 0.001, False
        while (count := store.add(here, 0)) < place.world_size:
            waited, missing = time.monotonic() - began, f"{place.world_size - count} of {where}"
            if waited >= timeout.total_seconds():
                absent = _absent_ranks(store, number, place.world_size)
                raise PeerError(
                    f"rank {place.rank} waited {waited:.0f} s for {missing}: {_ranks_have(absent)} not come"
                )
            if waited >= _SPEAK_AFTER_SECONDS and not said:
                absent, said = _absent_ranks(store, number, place.world_size), True
                if absent and place.rank == min(set(range(place.world_size)) - set(absent)):
                    logger.warning("waiting for %s: %s not come", missing, _ranks_have(absent))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    except RuntimeError as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"waiting for {where}: the process that keeps the ranks' store is gone: {error}") from error


def _absent_ranks(store: Store, number: int, world_size: int) -> list[int]:
    """Return the ranks below ``world_size`` that have not yet begun their ``number``-th call (from 1) of `await_ranks`
    with ``store``."""
    return [rank for rank in range(world_size) if store.add(f"zero-comm/came/{rank}", 0) < number]


def _ranks_have(ranks: list[int]) -> str:
    """Return the beginning of a sentence about ``ranks``: "rank 1 has", "ranks 1, 2 have"; beyond eight, "ranks 0, …, 7
    and 3 more have"."""
    more = f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else ""
    named = ", ".join(map(str, ranks[:_MOST_NAMES]))
    return f"rank {named} has" if len(ranks) == 1 else f"ranks {named}{more} have"
