"""Run each rank's work before the first collective, so that a failure on one rank raises on all."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .errors import DesyncError, PeerError

_KEY = "zero-comm/starting"
_SPEAK_AFTER_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 0.5

logger = logging.getLogger("zero_comm")


@contextmanager
def starting_together(what: str, timeout: timedelta | None = None, *, alike: str = "") -> Iterator[None]:
    """Run the block on every rank of the world, and leave the context when all ranks are through theirs. Issues no
    collective; it meets in torch's key-value store.

    ``what`` names the user's call in errors. ``alike``: a text that must be equal on every rank; a rank with another
    text than the first one's raises DesyncError instead of running the block. A single rank compares nothing.
    ``timeout``: of waiting for the others, default 30 minutes. Every rank must use this equally often.

    An exception of the block, or that DesyncError, is raised on its rank; the others raise PeerError with that cause
    within a second of reaching the end of their own blocks. They also raise PeerError after ``timeout``, naming the
    ranks that have not come, and when the process that keeps the store is gone by then; where it was gone before the
    block, `dist.DistError` is raised.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        yield
        return
    store = PrefixStore(_KEY, dist.distributed_c10d._get_default_store())
    number = store.add(f"calls/{rank}", 1)  # in the store: a process may have had several engines
    meeting = PrefixStore(str(number), store)
    try:
        _check_alike(meeting, what, alike)
        yield
    except BaseException as failure:
        meeting.compare_set("failed", "", json.dumps([rank, f"{type(failure).__name__}: {failure}"]))
        raise
    meeting.add("through", 1)
    try:
        _wait_until_through(meeting, store, number, what, timeout or timedelta(minutes=30))
    except dist.DistError as error:
        raise PeerError(f"{what}: the process that keeps the ranks' store is gone: {error}") from error


def _check_alike(meeting: Store, what: str, alike: str) -> None:
    """Raise DesyncError if the first rank that came to ``meeting`` (the store's keys of this call) brought another text
    than ``alike``. ``what``: names the user's call."""
    first, theirs = json.loads(meeting.compare_set("alike", "", json.dumps([dist.get_rank(), alike])))
    if theirs != alike:
        raise DesyncError(f"{what}: expected the same on every rank, got {theirs} on rank {first} and {alike} here")


def _wait_until_through(meeting: Store, store: Store, number: int, what: str, timeout: timedelta) -> None:
    """Wait until all ranks are through their blocks of this call; log after 10 s who is missing. Raises PeerError when
    one has failed, or after ``timeout``.

    ``meeting``: the store's keys of this call. ``store``: those of all calls. ``number``: of this call among the
    process's calls of `starting_together`, from 1. ``what``: names the user's call.
    """
    world_size, begin, pause, said = dist.get_world_size(), time.monotonic(), 0.001, False
    while meeting.add("through", 0) < world_size:
        if meeting.check(["failed"]):
            rank, reason = json.loads(meeting.get("failed"))
            raise PeerError(f"{what}: rank {rank} failed: {reason}")
        waited = time.monotonic() - begin
        if waited > _SPEAK_AFTER_SECONDS and not said:
            logger.warning("%s: has waited %.0f s for %s", what, waited, _describe_absent(store, number))
            said = True
        if waited > timeout.total_seconds():
            raise PeerError(f"{what}: waited {waited:.0f} s for {_describe_absent(store, number)}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _describe_absent(store: Store, number: int) -> str:
    """Return words for a message about who is waited for: the ranks that have not begun their call ``number`` of
    `starting_together`, as "ranks 1, 2 to make the same call", or "ranks that are slow in it" if all have. ``store``:
    the keys of all calls."""
    absent = [rank for rank in range(dist.get_world_size()) if store.add(f"calls/{rank}", 0) < number]
    if not absent:
        return "ranks that are slow in it"
    return f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} to make the same call"
