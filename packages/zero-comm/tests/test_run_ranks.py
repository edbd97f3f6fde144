"""`run_ranks` itself: results by rank, tracebacks, timeouts, and workers that are used again."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from zero_comm import RanksFailedError, run_ranks
from zero_comm.testing import cores_of


def facts(word: str) -> tuple[int, int, str, int, int]:
    return dist.get_rank(), dist.get_world_size(), word, os.getpid(), torch.get_num_threads()


def own_cores() -> set[int]:
    return os.sched_getaffinity(0)


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on rank {rank}")
    return dist.get_rank()


def sleep(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)


def test_results_come_by_rank_and_the_processes_are_used_again() -> None:
    first, second = run_ranks(facts, 3, "a"), run_ranks(facts, 2, "b")
    assert [f[:3] for f in first] == [(0, 3, "a"), (1, 3, "a"), (2, 3, "a")]
    assert [f[3] for f in second] == [f[3] for f in first[:2]] and os.getpid() not in {f[3] for f in first}
    assert all(f[4] == 1 for f in first)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_have_cores_of_their_own_where_there_are_as_many_and_else_all(world_size: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert [cores_of(rank, world_size, [4, 6]) for rank in range(world_size)] == {
        1: [[4, 6]],
        2: [[4], [6]],
        3: [[4, 6]] * 3,
    }[world_size]
    assert run_ranks(own_cores, world_size) == [set(cores_of(rank, world_size, cores)) for rank in range(world_size)]


def test_a_rank_that_raises_is_reported_with_its_traceback_and_the_next_call_works() -> None:
    with pytest.raises(RanksFailedError, match="no luck on rank 1") as caught:
        run_ranks(fail_on, 2, 1)
    assert list(caught.value.failures) == [1]
    assert "--- rank 1 ---" in str(caught.value) and "in fail_on" in str(caught.value)
    assert run_ranks(fail_on, 2, 7) == [0, 1]


def test_a_rank_that_does_not_answer_is_named_and_ended() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] gave no answer in 1 s"):
        run_ranks(sleep, 2, 600.0, timeout=1.0)


class Interrupted(BaseException):
    """As what a test's own time limit raises from a signal handler."""


def test_a_call_that_is_cut_short_ends_its_workers_and_the_next_has_its_own_results() -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = run_ranks(facts, 2, "before")
    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Interrupted):
            run_ranks(sleep, 2, 2.0)
    finally:
        signal.signal(signal.SIGALRM, handler)
    after = run_ranks(facts, 2, "after")
    assert [found[2] for found in after] == ["after", "after"]
    assert {found[3] for found in after}.isdisjoint(found[3] for found in before)
