"""Averaged gradients between backward and step: shown, discarded, completed and refused."""

from __future__ import annotations

import weakref

import pytest
from memory_groups import MemoryRank, run_threads
from pass_parts import UNITS, Parts

from zero_partition import PartitionError


def after_a_pass(parts: Parts) -> Parts:
    parts.begin()
    for index in range(UNITS):
        parts.compute(index)
    parts.end()
    return parts


def shown(rank: MemoryRank) -> tuple[list[float], bool, bool]:
    parts = after_a_pass(Parts(rank, releasable=False, full_gradients=True))
    before = all(p.grad is None for unit in parts.units for p in unit.parameters)
    parts.held.show()
    values = [float(p.grad.mean()) for unit in parts.units for p in unit.parameters if p.grad is not None]
    parts.held.hide()
    return values, before, all(p.grad is None for unit in parts.units for p in unit.parameters)


@pytest.mark.parametrize("world_size", [1, 2])
def test_where_every_rank_has_the_averages_they_are_shown_and_hidden(world_size: int) -> None:
    mean = (world_size + 1) / 2
    assert run_threads(shown, world_size) == [([mean] * 2 * UNITS, True, True)] * world_size


def casts_alive(rank: MemoryRank, end: str) -> tuple[int, int]:
    parts = after_a_pass(Parts(rank, releasable=False, full_gradients=True))
    parameters = [p for unit in parts.units for p in unit.parameters]
    for parameter in parameters:  # of another dtype than their unit: each .grad is a cast with memory of its own
        parameter.data = parameter.data.double()
    parts.held.show()
    grads = [weakref.ref(p.grad) for p in parameters if p.grad is not None]
    getattr(parts.held, end)()
    return len(grads), sum(ref() is not None for ref in grads)


@pytest.mark.parametrize("end", ["hide", "discard"])
def test_casts_of_averages_are_let_go_of_when_they_are_no_longer_shown(end: str) -> None:
    assert run_threads(casts_alive, 1, end) == [(2 * UNITS, 0)]


def discarded(rank: MemoryRank) -> list[object]:
    parts = after_a_pass(Parts(rank))
    parts.reducer.torn = "why"
    parts.held.discard([parts.units[1].parameters[0]])
    some = [list(g.touched) for g in parts.gradients]
    torn = parts.reducer.torn
    parts.held.discard()
    return [some, torn, [any(g.touched) for g in parts.gradients], parts.reducer.torn]


def test_discarding_some_keeps_the_rest_and_what_is_torn_and_discarding_all_keeps_nothing() -> None:
    expected = [[[True, True], [False, True], [True, True]], "why", [False] * UNITS, None]
    assert run_threads(discarded, 2) == [expected, expected]


def inside(rank: MemoryRank) -> None:
    parts = after_a_pass(Parts(rank))
    parts.calls.in_backward = True
    with pytest.raises(PartitionError, match="zero_grad was called inside a backward pass"):
        parts.held.discard()
    assert all(g.touched == [True, True] for g in parts.gradients)


def test_discarding_inside_a_backward_pass_is_refused_and_changes_nothing() -> None:
    run_threads(inside, 1)


def flushed(rank: MemoryRank) -> tuple[list[float | None], list[float | None]]:
    parts = Parts(rank)
    if rank.rank == 1:  # gradients that came behind the pass, on one rank alone
        parts.compute(2)
    before = parts.averages()
    parts.held.flush()
    return before, parts.averages()


def test_gradients_that_came_late_on_one_rank_are_averaged_on_all() -> None:
    nothing: list[float | None] = [None] * UNITS
    assert run_threads(flushed, 2) == [(nothing, [None, None, 1.0])] * 2


def torn(rank: MemoryRank) -> None:
    parts = after_a_pass(Parts(rank))
    parts.held.refuse_torn("step")
    parts.reducer.torn = "ValueError: no"
    with pytest.raises(PartitionError, match=r"step: an earlier backward pass or step failed \(ValueError: no\)"):
        parts.held.refuse_torn("step")
    parts.held.forget()
    parts.held.refuse_torn("step")
    assert parts.averages() == [None] * UNITS


def test_a_part_of_a_failed_pass_is_refused_until_it_is_forgotten() -> None:
    run_threads(torn, 1)
