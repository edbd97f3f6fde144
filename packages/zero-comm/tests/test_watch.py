"""The watch: ranks that live are waited for whatever their main thread does, and waits that cannot end are ended."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zero_comm import EngineGroups, Message, PeerError, run_ranks

PATIENCE = 3.0
LONGER = 6.0


def keep_the_lock(seconds: float) -> None:
    """One call of an extension in C that keeps Python's lock."""
    began = time.perf_counter()
    sum(itertools.repeat(1, 10_000_000))
    each = (time.perf_counter() - began) / 10_000_000
    sum(itertools.repeat(1, int(seconds / each)))


def wait_in_the_store(seconds: float) -> None:
    with suppress(dist.DistStoreError):
        dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=seconds))


def exchange(seconds: float, pair: dist.ProcessGroup) -> None:
    """Collectives of the script at one line, which move data all the time."""
    until = time.monotonic() + seconds
    enough = torch.zeros(1 << 16)
    while enough[0] == 0:
        enough[0] = time.monotonic() > until
        dist.all_reduce(enough, group=pair)


def is_slow(how: str) -> str:
    pair = dist.new_group([1, 2])
    groups = EngineGroups.open([list(range(dist.get_world_size()))], stopped_after=PATIENCE)
    try:
        if dist.get_rank() > 0:
            if how == "exchange":
                exchange(LONGER, pair)
            elif dist.get_rank() == 1:
                {"lock": keep_the_lock, "store": wait_in_the_store}[how](LONGER)
        groups.control.agree(Message("step", "", 1))
    except PeerError as error:
        return str(error)
    finally:
        groups.close()
    return "continued"


@pytest.mark.parametrize("how", ["lock", "store", "exchange"])
def test_a_rank_that_lives_and_is_slow_is_waited_for(how: str) -> None:
    assert run_ranks(is_slow, 3, how, timeout=60) == ["continued"] * 3


def leaves_early() -> str:
    groups = EngineGroups.open([[0, 1]], stopped_after=PATIENCE)
    try:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(1))
        groups.control.agree(Message("step", "", 7))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        groups.close()
    return "continued"


def test_a_rank_in_a_collective_of_its_own_ends_the_job_after_the_time_that_is_set() -> None:
    first, second = run_ranks(leaves_early, 2, timeout=30)
    assert first.startswith("PeerError: rank 1 left the others: the ranks wait for one another"), first
    assert "rank 0: waits at step '' in step 7" in first, first
    assert "rank 1: is in torch.distributed.all_reduce at test_watch.py:" in first, first
    assert second.startswith(("RuntimeError", "PeerError")), second
