"""A rank that fails tells why, and every rank that waits for it hears the first cause."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from comm_ranks import engine_groups, failure_of

from zero_comm import Message, Tag, run_ranks


def hear_abort(waits_in: str) -> str:
    groups = engine_groups()
    if groups.gather.rank == 1:
        groups.control.abort("OutOfMemory: no room for layer 3")
        groups.gather.close()
        groups.reduce.close()
        return "aborted"
    if waits_in == "exchange":
        return failure_of(groups.control.exchange, Message("forward", "model", 5))
    world_size = groups.gather.world_size
    if waits_in == "gather":
        work = groups.gather.all_gather(torch.empty(4 * world_size), torch.zeros(4), Tag("gather", "layer 3", 5))
    else:
        work = groups.reduce.reduce_scatter(torch.zeros(4 * world_size), torch.empty(4), Tag("reduce", "layer 3", 5))
    return failure_of(work.wait)


@pytest.mark.parametrize("waits_in", ["exchange", "gather", "reduce"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_abort_reaches_ranks_that_wait_and_tells_them_who_failed_and_why(world_size: int, waits_in: str) -> None:
    results = run_ranks(hear_abort, world_size, waits_in, timeout=30)
    for rank, text in enumerate(results):
        if rank != 1:
            assert text.startswith("PeerError: rank 1 failed") and "OutOfMemory: no room for layer 3" in text, results


def hear_first_cause() -> str:
    """Rank 2 fails; rank 0 waits for its data; rank 1 is at an agreement point and hears rank 0's complaint as well."""
    groups = engine_groups()
    if groups.gather.rank == 2:
        groups.control.abort("ValueError: a bad batch")
        groups.gather.close()
        groups.reduce.close()
        return "aborted"
    if groups.gather.rank == 0:
        return failure_of(groups.gather.all_gather(torch.empty(6), torch.zeros(2), Tag("gather", "u")).wait)
    return failure_of(groups.control.exchange, Message("forward", "model", 0))


def test_the_first_cause_is_told_and_not_the_complaint_of_another_victim() -> None:
    zero, one, _ = run_ranks(hear_first_cause, 3, timeout=30)
    assert "rank 2 failed" in zero and "ValueError: a bad batch" in zero
    assert "rank 2 failed" in one and "ValueError: a bad batch" in one


def abort_with(length: int) -> str:
    control = engine_groups().control
    if control.rank == 1:
        control.abort("\N{CYRILLIC SMALL LETTER ZHE}" * length)
        return "aborted"
    return failure_of(control.exchange, Message("forward", "", 0))


@pytest.mark.parametrize("length", [40, 10_000])
def test_a_long_reason_is_cut_and_still_heard(length: int) -> None:
    text = run_ranks(abort_with, 2, length, timeout=30)[0]
    assert text.startswith("PeerError: rank 1 failed") and "\N{CYRILLIC SMALL LETTER ZHE}" * 20 in text


def confer_with_late_ranks(patience: float) -> str:
    """Rank 2 answers within ``patience`` seconds of rank 0's call, rank 1 within ``patience`` of that."""
    control, store = engine_groups().control, dist.distributed_c10d._get_default_store()
    failure = ValueError("a bad batch")
    if control.rank == 0:
        store.set("confers", "")
        answer = control.confer("forward", 3, failure, "0", patience)
        control.abort("gave up")
        return str(answer)
    store.wait(["confers"])
    time.sleep(patience * (0.9 if control.rank == 2 else 1.7))
    control.confer("forward", 3, failure, str(control.rank), 60.0)
    return "answered"


def test_patience_is_for_all_ranks_together() -> None:
    assert run_ranks(confer_with_late_ranks, 3, 3.0, timeout=60)[0] == "None"
