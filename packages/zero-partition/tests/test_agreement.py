"""Ranks meet: they get each other's messages, learn what each has observed, and serve what one of them requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_groups import MemoryRank, run_threads

from zero_comm import CommError, DesyncError
from zero_partition import PartitionError
from zero_partition.agreement import Agreement, Liveness
from zero_partition.live import UnitState
from zero_partition.messages import LockStep, StepNumber
from zero_partition.ordered_gathers import OrderedGathers
from zero_partition.ordered_reductions import OrderedReductions
from zero_partition.route import Secondary
from zero_partition.training_loop import FollowedLoop
from zero_partition.user_edits import UserEdits
from zero_partition.user_gradients import UserGradients


class Made:
    """An agreement and what it takes along."""

    def __init__(self, rank: MemoryRank) -> None:
        step = StepNumber(7)
        self.rank = rank
        self.units = [rank.unit(index) for index in range(3)]
        gradients = [rank.gradients(unit) for unit in self.units]
        self.gathers = OrderedGathers(self.units, step)
        reductions = OrderedReductions(gradients, self.gathers, step, torch.device("cpu"), bucket_numel=100)
        self.user_gradients = UserGradients(gradients, FollowedLoop())
        self.failures: list[BaseException] = []
        self.liveness = Liveness(self.failures.append, lambda: None, sharded=True)
        edits = UserEdits(self.units, rank.control.world_size, rank.broadcast)
        self.agreement = Agreement(
            rank.control, self.liveness, self.units, step, self.gathers, reductions, edits, self.user_gradients
        )


def meets(rank: MemoryRank) -> tuple[list[Any], list[LockStep]]:
    agreement = Made(rank).agreement
    payloads = agreement.agree("save", "folder", [rank.rank])
    assert rank.control.sent[-1].step == 7
    return payloads, agreement.agree_in_lock_step(LockStep(rank.rank, 1, 0, False))


def test_every_rank_gets_all_payloads_in_rank_order() -> None:
    for payloads, lock_step in run_threads(meets, 3):
        assert payloads == [[0], [1], [2]]
        assert lock_step == [LockStep(rank, 1, 0, False) for rank in range(3)]


def parts(rank: MemoryRank) -> str:
    try:
        Made(rank).agreement.agree("save" if rank.rank else "load", "folder", None)
    except DesyncError as error:
        return str(error)
    return ""


def test_ranks_at_different_calls_are_told_every_ranks_call() -> None:
    for text in run_threads(parts, 2):
        assert "rank 0: load 'folder' in step 7" in text and "rank 1: save 'folder' in step 7" in text


def requests(rank: MemoryRank) -> tuple[list[str], UnitState, list[str]]:
    made = Made(rank)
    if rank.rank == 0:
        made.agreement.request(2)
    made.agreement.agree("step", "", None)
    unit = made.units[2]
    unit.wait_gather()
    state = unit.state
    unit.release()
    return rank.gather.issued, state, [message.kind for message in rank.control.sent]


def test_a_requested_unit_is_gathered_with_all_ranks_which_then_repeat_their_own_message() -> None:
    first, second = run_threads(requests, 2)
    assert first == (["gather u2"], UnitState.GATHERED, ["request", "step"])
    assert second == (["gather u2"], UnitState.RELEASED, ["step", "step"])


def observes(rank: MemoryRank) -> tuple[list[int], bool]:
    made = Made(rank)
    secondary = made.units[1].route.secondary = Secondary(rank.gather, made.units[1].layout)  # type: ignore[arg-type]
    secondary.fresh = True
    made.gathers.begin("forward")
    for index in [[2, 0], [1]][rank.rank]:
        made.gathers.note_use(made.units[index])
    made.gathers.close(observed=True)
    if rank.rank == 1:
        made.agreement.note_changed(made.units[1])
    made.agreement.agree("flush", "", None)
    return list(made.gathers.order), secondary.fresh


def test_observations_of_any_rank_reach_all_of_them() -> None:
    assert run_threads(observes, 2) == [([1, 2, 0], False)] * 2


def discards(rank: MemoryRank, by_rank: tuple[int, int]) -> str:
    made = Made(rank)
    made.user_gradients.discards = by_rank[rank.rank]
    with pytest.raises(PartitionError) as refusal:
        made.agreement.agree("step", "", None)
    return str(refusal.value)


def test_gradients_that_one_rank_alone_discarded_are_refused_on_every_rank() -> None:
    first, second = run_threads(lambda rank: discards(rank, (0, 1)), 2)
    assert first == second and first.startswith("rank 1 discarded gradients") and "rank 0 did not:" in first


def test_gradients_that_ranks_discarded_at_different_points_are_refused_without_saying_which_they_were() -> None:
    first, second = run_threads(lambda rank: discards(rank, (5, 7)), 2)
    assert first == second and "rank 1 discarded others, or at another point:" in first


def synced(rank: MemoryRank) -> list[str | None]:
    agreement = Made(rank).agreement
    agreement.synced = True
    if rank.rank == 0:
        agreement.agree("forward", "decoder", None)
        return [agreement.meet_done()]
    return [agreement.meet_done(), agreement.meet_done()]


def test_a_rank_that_is_done_learns_of_the_others_forward_passes_until_all_are_done() -> None:
    assert run_threads(synced, 2) == [[None], ["decoder", None]]


def test_an_engine_that_has_ended_refuses_to_meet_and_tells_the_others_once() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        made.liveness.end(ValueError("first"))
        made.liveness.end(ValueError("second"))
        assert made.liveness.failed and [str(failure) for failure in made.failures] == ["first"]
        with pytest.raises(CommError, match=r"failed earlier and cannot continue: ValueError: first.*is its shards"):
            made.agreement.agree("step", "", None)

    run_threads(check, 1)
