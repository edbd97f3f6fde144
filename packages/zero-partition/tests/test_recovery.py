"""A pass that fails: who may continue, and that the process groups are then at one place on every rank."""

from __future__ import annotations

import pytest
from memory_groups import MemoryRank, run_threads
from pass_parts import UNITS, Parts

from zero_comm import CommError
from zero_partition.recovery import add_advice

FAILURE = ValueError("the user's")


def alone(rank: MemoryRank) -> tuple[bool, bool, bool]:
    parts = Parts(rank)
    parts.begin()
    parts.compute(1)
    goes_on = parts.recovery.abandon_pass("backward", FAILURE, awaited=False)
    return goes_on, parts.released(), parts.gathers.active or parts.reductions.active


def test_one_rank_alone_goes_on_and_nothing_of_the_pass_is_left() -> None:
    assert run_threads(alone, 1) == [(True, True, False)]


def together(rank: MemoryRank) -> tuple[bool, bool, list[str], list[str], list[float | None]]:
    parts = Parts(rank)
    parts.begin()  # the first pass of an engine: nobody waits, so ranks stop at different places
    for unit in parts.units[: rank.rank]:
        parts.gathers.issue_through(unit)
    goes_on = parts.recovery.abandon_pass("backward", FAILURE, awaited=False)
    issued = list(rank.gather.issued), list(rank.reduce.issued)
    parts.reducer.clear()
    parts.begin()
    for index in range(UNITS):
        parts.compute(index)
    parts.end()
    return goes_on, parts.released(), *issued, parts.averages()


def torn(rank: MemoryRank) -> bool:
    parts = Parts(rank)
    parts.is_torn = True
    return parts.recovery.abandon_pass("backward", KeyboardInterrupt(), awaited=False)


def test_a_rank_that_left_an_exchange_half_way_does_not_go_on() -> None:
    assert run_threads(torn, 2) == [False, False]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_failed_in_one_call_issue_what_another_has_and_the_next_pass_is_right(world_size: int) -> None:
    mean = (world_size + 1) / 2
    for goes_on, released, gathers, reductions, averages in run_threads(together, world_size):
        assert goes_on and released and averages == [mean] * UNITS
        assert gathers == [f"gather u{index}" for index in range(world_size - 1)] and reductions == []


def unmet(rank: MemoryRank, failure: BaseException, awaited: bool, in_pass: bool) -> tuple[bool, bool]:
    parts = Parts(rank)
    parts.meets_others = False
    if in_pass:
        parts.gatherer.begin("forward")
    return parts.recovery.abandon_pass("forward", failure, awaited=awaited), parts.gathers.active


@pytest.mark.parametrize(
    ("failure", "awaited", "in_pass", "goes_on"),
    [
        (FAILURE, False, True, False),  # the others compute on, and wait for this rank's gathers
        (FAILURE, True, False, False),
        (FAILURE, False, False, True),  # nobody waits
        (KeyboardInterrupt(), False, True, False),  # the script ends
        (CommError("a peer is gone"), False, False, False),
    ],
)
def test_a_rank_that_others_wait_for_does_not_go_on(
    failure: BaseException, awaited: bool, in_pass: bool, goes_on: bool
) -> None:
    assert run_threads(unmet, 2, failure, awaited, in_pass) == [(goes_on, in_pass)] * 2


def told(rank: MemoryRank) -> list[str]:
    parts = Parts(rank)
    parts.recovery.announce_failure("backward", FAILURE)
    return parts.words


def test_a_failure_is_told_with_its_call_and_step() -> None:
    assert run_threads(told, 1) == [["ValueError: the user's, in backward of step 7"]]


@pytest.mark.parametrize("torn", [False, True])
def test_advice_after_an_update_that_failed_in_the_middle_is_to_load_a_checkpoint(
    torn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for half_written, continues in ((None, True), ("the update of 'layer' in step 3", False)):
        caplog.clear()
        failure = ValueError("broke")
        add_advice(failure, torn=torn, half_written=half_written)
        words = " ".join(getattr(failure, "__notes__", [caplog.text]))
        assert ("the engine continues" in words) == continues
        assert continues or ("the update of 'layer' in step 3 has left" in words and "load_checkpoint" in words)
