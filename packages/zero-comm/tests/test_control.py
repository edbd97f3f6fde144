"""Messages at agreement points: everyone hears everyone, and disagreement is said by name."""

from __future__ import annotations

import pytest
import torch
from comm_ranks import engine_groups, failure_of

from zero_comm import Message, Tag, run_ranks


SIZES = [0, 50, 85, 2_000]  # characters of two bytes: inside one frame, about as long as it, and several


def payload(rank: int, size: int) -> dict[str, object]:
    return {"rank": rank, "text": "é" * (size * (rank + 1)), "flags": [True, None, 1.5]}


def agree_on_all() -> list[list[object]]:
    control = engine_groups().control
    return [control.agree(Message("point", f"n{size}", size, payload(control.rank, size))) for size in SIZES]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_every_payload_whatever_its_size(world_size: int) -> None:
    expected = [[payload(rank, size) for rank in range(world_size)] for size in SIZES]
    assert run_ranks(agree_on_all, world_size) == [expected] * world_size


def every_length_around_the_frame() -> bool:
    control = engine_groups().control
    for length in range(440, 540):
        body = "x" * (length if control.rank == 0 else 10)
        if control.agree(Message("m", "", 0, body))[0] != "x" * length:
            return False
    return True


def test_messages_just_below_and_above_one_frame_arrive_whole() -> None:
    assert run_ranks(every_length_around_the_frame, 2) == [True, True]


def disagree() -> str:
    control = engine_groups().control
    kind = "forward" if control.rank != 1 else "step"
    return failure_of(control.agree, Message(kind, "model", control.rank, None))


def test_ranks_at_different_calls_get_a_listing_of_what_each_one_did() -> None:
    for text in run_ranks(disagree, 3):
        assert text.startswith("DesyncError: the ranks are at different calls:")
        for line in (
            "rank 0: forward 'model' in step 0",
            "rank 1: step 'model' in step 1",
            "rank 2: forward 'model' in step 2",
        ):
            assert line in text


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
        work = groups.reduce.reduce(torch.zeros(4 * world_size), torch.empty(4), Tag("reduce", "layer 3", 5))
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
