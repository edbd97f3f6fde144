"""Gathers and reductions of ranks that compute in different orders: nobody waits for what another does not issue."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_groups import MemoryRank, run_threads

from zero_partition.agreement import Agreement, Liveness
from zero_partition.gatherer import Gatherer
from zero_partition.interleaving import Interleaving
from zero_partition.messages import LockStep, StepNumber
from zero_partition.ordered_gathers import OrderedGathers
from zero_partition.ordered_reductions import OrderedReductions
from zero_partition.reducer import Reducer
from zero_partition.training_loop import FollowedLoop
from zero_partition.user_edits import UserEdits
from zero_partition.user_gradients import UserGradients

UNITS = 4


class Made:
    """The collaborators of a backward pass on one rank, which meets the others as `Agreement` does."""

    def __init__(self, rank: MemoryRank, *, prefetch: int = 0, complete: bool = False) -> None:
        self.rank = rank
        step = StepNumber()
        self.units = [rank.unit(index) for index in range(UNITS)]
        self.gradients = [rank.gradients(unit) for unit in self.units]
        self.gathers = OrderedGathers(self.units, step)
        self.reductions = OrderedReductions(
            self.gradients, self.gathers, step, torch.device("cpu"), bucket_numel=1000, complete=complete
        )
        edits, users = UserEdits(self.units, 1, rank.broadcast), UserGradients(self.gradients, FollowedLoop())
        alive = Liveness(lambda failure: None, lambda: None, sharded=True)
        self.agreement = Agreement(rank.control, alive, self.units, step, self.gathers, self.reductions, edits, users)
        self.interleaving = Interleaving(self.gathers, self.reductions, self.meet)
        self.gatherer = Gatherer(
            self.units,
            self.gathers,
            self.interleaving,
            self.agreement.request,
            rank.residency,
            rank.live,
            prefetch_numel=prefetch,
            max_live_numel=1000,
        )
        self.reducer = Reducer(self.gradients, self.reductions, self.interleaving)
        self.meetings = 0

    def exchange(self, data: Any) -> list[Any]:
        return self.agreement.agree("flush", "", data)

    def meet(self, message: LockStep) -> list[LockStep]:
        self.meetings += 1
        return self.agreement.agree_in_lock_step(message)

    def backward(self, used: list[int]) -> None:
        """Gather the units ``used`` in that order, and give each the gradients of a rank that used it."""
        self.gatherer.begin("backward")
        self.interleaving.begin()
        for index in used:
            self.reducer.mark_ran(index)
        self.reducer.begin(range(UNITS))
        for index in used:
            unit = self.units[index]
            self.gatherer.gather(unit)
            for number, parameter in enumerate(unit.parameters):
                gradient = torch.full(parameter.shape, 1.0 + self.rank.rank, dtype=torch.float64)
                self.gradients[index].add(number, gradient, more_follow=False)
                if self.reducer.arrived(index, number):
                    self.gatherer.release(unit)
        self.reducer.start_rest()
        self.interleaving.leave_lock_step()
        self.gatherer.end()
        self.reducer.finish()
        self.interleaving.end()

    def late(self) -> set[int]:
        """Units that are still to be reduced somewhere."""
        return {index for units in self.exchange(self.reducer.unreduced()) for index in units}


def train(rank: MemoryRank, plan: list[list[list[int]]], prefetch: int, complete: bool) -> dict[str, Any]:
    """Run a plan (by step and rank, the units used in order); by step, the averaged gradient of every unit."""
    made = Made(rank, prefetch=prefetch, complete=complete)
    averages, meetings = [], []
    for by_rank in plan:
        made.backward(by_rank[rank.rank])
        meetings.append(made.meetings)
        made.reducer.reduce_scatter_now(made.late())
        averages.append([float(g.reduced[0]) if g.reduced is not None else None for g in made.gradients])
        made.reducer.clear()
    return {"averages": averages, "meetings": meetings, "order": (rank.gather.issued, rank.reduce.issued)}


def expected(by_rank: list[list[int]]) -> list[float]:
    given = [sum(1.0 + rank for rank, used in enumerate(by_rank) if index in used) for index in range(UNITS)]
    return [total / len(by_rank) for total in given]


FORTH = list(range(UNITS))
BACK = FORTH[::-1]
PLANS = {
    "alike": [[FORTH, FORTH]] * 3,
    "opposite": [[FORTH, BACK], [FORTH, BACK], [BACK, FORTH]],
    "apart": [[[0, 1], [2, 3]], [[3], [0, 1, 2]], [[], FORTH]],
    "three": [[FORTH, BACK, [2]], [[1], [3, 0], BACK], [FORTH, FORTH, FORTH]],
}


@pytest.mark.parametrize("prefetch", [0, 1000])
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_every_gradient_is_averaged_and_collectives_match(name: str, complete: bool, prefetch: int) -> None:
    plan = PLANS[name]
    results = run_threads(train, len(plan[0]), plan, prefetch, complete)
    for result in results:
        for averages, by_rank in zip(result["averages"], plan, strict=True):
            assert averages == pytest.approx(expected(by_rank), rel=1e-12)
        assert result["order"] == results[0]["order"]


ORDERS = st.lists(st.integers(0, UNITS - 1), unique=True, max_size=UNITS)


@settings(max_examples=40, deadline=None)
@given(
    plan=st.lists(st.lists(ORDERS, min_size=3, max_size=3), min_size=1, max_size=4),
    prefetch=st.sampled_from([0, 15, 1000]),
    complete=st.booleans(),
)
def test_any_units_in_any_order_on_any_rank(plan: list[list[list[int]]], prefetch: int, complete: bool) -> None:
    for result in run_threads(train, 3, plan, prefetch, complete):
        for averages, by_rank in zip(result["averages"], plan, strict=True):
            assert averages == pytest.approx(expected(by_rank), rel=1e-12)


def test_ranks_meet_in_lock_step_only_until_the_order_is_learned() -> None:
    for result in run_threads(train, 2, PLANS["alike"], 0, False):
        assert result["meetings"][0] > 0 and result["meetings"][1:] == result["meetings"][:1] * 2


def test_passes_that_have_to_be_complete_stay_in_lock_step() -> None:
    for result in run_threads(train, 2, PLANS["alike"], 0, True):
        assert result["meetings"][0] < result["meetings"][1] < result["meetings"][2]


def test_ranks_meet_only_before_waits_for_what_not_all_are_known_to_have_issued() -> None:
    for prefetch, most in ((0, UNITS + 2), (1000, 4)):
        for result in run_threads(train, 2, PLANS["alike"], prefetch, True):
            assert result["meetings"][0] <= most


def travelling(rank: MemoryRank) -> list[int]:
    made = Made(rank)
    for index in BACK:
        made.reducer.mark_ran(index)
    made.reducer.begin(range(UNITS))
    counts = []
    for index in BACK:
        for number, parameter in enumerate(made.units[index].parameters):
            made.gradients[index].add(number, torch.ones(parameter.shape, dtype=torch.float64), more_follow=False)
            made.reducer.arrived(index, number)
        counts.append(made.reducer.started)
    made.reducer.finish()
    return counts


def test_a_unit_is_reduced_as_soon_as_its_last_gradient_is_there() -> None:
    assert run_threads(travelling, 2) == [[1, 2, 3, 4]] * 2


def test_a_failed_pass_starts_what_another_rank_has_started_and_learns_nothing() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        for index in BACK:
            made.reducer.mark_ran(index)
        made.reducer.begin(range(UNITS))
        made.interleaving.start_until(2)
        assert made.reducer.started == 2
        made.reducer.abandon()
        assert not made.reducer.active and made.reductions.observed() is None

    run_threads(check, 1)
