"""Gathering: in the agreed order whatever a rank asks for, ahead within the bounds, and gone when it is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_groups import MemoryRank, run_threads

from zero_partition.gatherer import Gatherer
from zero_partition.live import UnitState
from zero_partition.messages import StepNumber
from zero_partition.ordered_gathers import OrderedGathers
from zero_partition.unit import Unit

UNITS = 5


class NothingBefore:
    """The waits of a pass that has no reductions; records the units waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def before_gather(self, unit: Unit) -> None:
        self.waited.append(unit.index)

    def before_unscheduled_gather(self) -> None:
        self.waited.append(-1)


class Counted(list[Unit]):
    """Units, and how often one of them was looked up."""

    looked_up = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked_up += 1
        return super().__getitem__(index)


class Made:
    """A gatherer over units of 8 elements, and its parts."""

    def __init__(
        self, rank: MemoryRank, *, prefetch: int = 0, live: int = 1000, count: int = UNITS, trainable: bool = True
    ) -> None:
        self.units = Counted(rank.unit(index, trainable=trainable) for index in range(count))
        self.gathers = OrderedGathers(self.units, StepNumber())
        self.waits = NothingBefore()
        self.requested: list[int] = []
        self.gatherer = Gatherer(
            self.units,
            self.gathers,
            self.waits,
            self.request,
            rank.residency,
            rank.live,
            prefetch_numel=prefetch,
            max_live_numel=live,
        )

    def request(self, index: int) -> None:
        self.requested.append(index)
        self.gathers.serve_request(index, True)

    def present(self) -> list[int]:
        return [u.index for u in self.units if u.state is UnitState.GATHERED]

    def run(self, key: str, used: list[int]) -> None:
        self.gatherer.begin(key)
        for index in used:
            self.gatherer.gather(self.units[index])
            self.gatherer.release(self.units[index])
        self.gatherer.end()


def gathered_values(rank: MemoryRank) -> list[float]:
    made = Made(rank)
    made.gatherer.begin("forward")
    made.gatherer.gather(made.units[2])
    values = torch.cat([p.detach() for p in made.units[2].parameters]).tolist()
    made.gatherer.end()
    assert all(torch.isnan(p.detach().as_subclass(torch.Tensor)).all() for p in made.units[2].parameters) is True
    return values


def test_a_gathered_unit_holds_every_ranks_shard() -> None:
    for values in run_threads(gathered_values, 2):
        assert values == [200.0 + n for n in range(8)]


def uneven(rank: MemoryRank) -> tuple[list[str], list[int]]:
    made = Made(rank)
    made.run("forward", [[0, 2, 4], [3], []][rank.rank])
    return rank.gather.issued, made.present()


def test_ranks_that_use_different_units_issue_the_same_gathers_and_keep_nothing() -> None:
    results = run_threads(uneven, 3)
    assert results == [([f"gather u{index}" for index in range(UNITS)], [])] * 3


def learned(rank: MemoryRank) -> dict[str, Any]:
    made = Made(rank)
    made.run("forward", [[3, 1], [4, 3]][rank.rank])
    mine = made.gathers.take_observed()
    made.gathers.learn([{"forward": [3, 1]}, {"forward": [4, 3]}])
    return {"observed": mine, "order": list(made.gathers.order), "again": made.gathers.take_observed()}


def test_the_order_is_learned_from_what_each_rank_used_and_is_the_same_everywhere() -> None:
    first, second = run_threads(learned, 2)
    assert first["observed"] == {"forward": [3, 1]} and second["observed"] == {"forward": [4, 3]}
    assert first["order"] == second["order"] == [4, 3, 1] and not first["again"]


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, 1), (1, 2), (8, 2), (16, 3), (1000, UNITS)])
def test_prefetch_is_bounded_by_elements_in_flight_and_one_unit_goes_ahead_whatever_its_size(
    prefetch: int, ahead: int
) -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank, prefetch=prefetch)
        made.gatherer.begin("forward")
        made.gatherer.gather(made.units[0])
        assert made.gathers.issued == ahead and made.present() == [0]
        assert made.waits.waited == [0]
        made.gatherer.end()

    run_threads(check, 1)


@pytest.mark.parametrize("trainable", [False, True])
def test_the_work_of_a_unit_does_not_grow_with_their_number(trainable: bool) -> None:
    def looked_up(rank: MemoryRank, count: int) -> int:
        made = Made(rank, live=100_000, count=count, trainable=trainable)
        made.run("forward", list(range(count)))
        made.gathers.learn([made.gathers.take_observed()])
        made.gatherer.begin("backward", like_reversed="forward")
        made.units.looked_up = 0
        for unit in reversed(list(made.units)):
            made.gatherer.gather(unit)
            made.gatherer.release_before(unit, lambda _: False)
            if trainable:
                made.gatherer.release(unit)
            else:
                assert made.present() == [index for index in (unit.index, unit.index + 1) if index < count]
        found = made.units.looked_up
        made.gatherer.end()
        return found

    def check(rank: MemoryRank) -> None:
        few, many = looked_up(rank, 100), looked_up(rank, 400)
        assert many < 4.2 * few

    run_threads(check, 1)


def test_a_frozen_unit_that_is_running_is_released_later() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank, trainable=False)
        made.gatherer.begin("backward")
        running = {0}
        for unit in made.units:
            made.gatherer.gather(unit)
            made.gatherer.release_before(unit, lambda other: other.index in running)
            if unit.index == 3:
                assert made.present() == [0, 2, 3]
                running.clear()
        assert made.present() == [3, 4]
        made.gatherer.end()

    run_threads(check, 1)


def test_units_that_were_only_joined_go_first_when_too_much_is_gathered() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank, live=16)
        made.gatherer.begin("forward")
        made.gatherer.gather(made.units[0])
        made.gatherer.gather(made.units[3])  # joins 1 and 2 on the way
        assert made.present() == [0, 3]
        made.gatherer.end()

    run_threads(check, 1)


def test_a_unit_that_its_pass_cannot_give_again_is_requested_and_stays_in_later_passes() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        made.run("forward", [0, 1, 0])
        assert made.requested == [0] and -1 in made.waits.waited
        assert made.gathers.take_observed() == {"forward": [0, 1]}
        made.gatherer.begin("forward")
        made.gatherer.gather(made.units[0])
        made.gatherer.release(made.units[0])
        assert made.present() == [0]
        made.gatherer.end()
        assert made.present() == []

    run_threads(check, 1)


def test_a_pinned_unit_stays_until_its_last_pin_is_gone() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        unit = made.units[1]
        unit.issue_gather(0, exact=True)
        unit.wait_gather()
        unit.pin()
        unit.pin()
        made.run("forward", [0, 1, 2])
        unit.unpin()
        assert made.present() == [1]
        unit.unpin()
        assert made.present() == []

    run_threads(check, 1)


def test_an_abandoned_pass_releases_everything_and_teaches_nothing() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank, prefetch=1000)
        made.gatherer.begin("forward")
        made.gatherer.gather(made.units[0])
        made.gatherer.abandon()
        assert made.present() == [] and not made.gathers.active and not made.gathers.take_observed()

    run_threads(check, 1)


def test_what_was_gathered_outside_passes_goes_with_the_next_meeting_unless_it_is_pinned() -> None:
    def check(rank: MemoryRank) -> None:
        made = Made(rank)
        for index in (0, 1):
            made.gatherer.gather(made.units[index])
            made.gathers.note_outside(made.units[index])
        made.units[1].pin()
        made.gathers.release_outside()
        assert made.present() == [1] and made.requested == [0, 1]

    run_threads(check, 1)
