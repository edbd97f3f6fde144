"""A unit is done when all of its modules have run and none is running."""

from __future__ import annotations

from memory_groups import MemoryRank, run_threads

from zero_partition.calls import ModuleCalls, RunningCall


def modules(rank: MemoryRank) -> None:
    unit, calls = rank.unit(0), ModuleCalls()
    unit.plan.members.update(a=unit.plan.members["u0"], b=unit.plan.members["u0"])
    del unit.plan.members["u0"]
    calls.begin_call(unit)
    calls.begin_call(unit)
    calls.end_call(unit, "a")
    assert calls.is_running(unit) and not calls.is_done(unit)
    calls.end_call(unit, "b")
    assert not calls.is_running(unit) and calls.is_done(unit)
    calls.add_caller(unit, "around")
    assert not calls.is_done(unit)
    calls.note_run(unit, "around")
    assert calls.is_done(unit)
    calls.restart()
    assert not calls.is_done(unit)


def test_modules_that_run_inside_each_other_and_one_around_them_are_all_waited_for() -> None:
    run_threads(modules, 1)


def test_forget_empties_every_stack_and_ends_both_passes() -> None:
    calls = ModuleCalls()
    stack = calls.new_stack()
    stack.append(RunningCall(True, None))
    calls.outermost, calls.in_backward = "model", True
    calls.forget_calls()
    assert not stack and calls.outermost is None and not calls.in_backward
