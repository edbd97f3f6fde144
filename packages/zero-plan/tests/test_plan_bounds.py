"""The least time of a step of a plan: what its operations move, and what a device computes one after another."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from zero_plan import load_machine, step_bounds, step_time
from zero_plan.dry_run.fakes import PlanMode
from zero_plan.dry_run.memory import LiveMemory
from zero_plan.dry_run.operations import SMALLEST_MOVED, Operations
from zero_plan.planned import HeldRow, RankPlan

SIDE = 2048
NBYTES = 4 * SIDE * SIDE  # of a float32 matrix


def moved(run: object) -> int:
    operations = Operations()
    with PlanMode(LiveMemory(), operations):
        given = torch.empty(SIDE, SIDE)
        operations.clear()
        run(given)  # type: ignore[operator]
    return operations.moved_nbytes


def test_operations_count_what_they_have_to_read_and_write() -> None:
    assert moved(lambda x: x + 1) == 2 * NBYTES
    assert moved(lambda x: x * x) == 2 * NBYTES  # one matrix is read once
    assert moved(lambda x: F.gelu(x.t())) == 2 * NBYTES
    assert moved(lambda x: x + x[:1].expand(SIDE, SIDE)) == 2 * NBYTES + 4 * SIDE  # the same row again
    assert moved(lambda x: torch.cat([x, x[:SIDE]])) == 4 * NBYTES
    assert moved(lambda x: x.sum(0)) == NBYTES + 4 * SIDE


def test_operations_that_may_move_less_do_not_count() -> None:
    assert moved(lambda x: x.view(-1)[5:].detach()) == 0  # views
    assert moved(lambda x: x @ x) == 0  # its operations count
    assert moved(torch.empty_like) == 0 and moved(lambda x: x.new_empty(SIDE, SIDE)) == 0  # not written
    assert moved(lambda x: torch.zeros(SIDE, SIDE)) == 0  # the system's pages of zeros
    assert moved(lambda x: F.embedding(torch.zeros(4, dtype=torch.long), x)) == 0  # reads four rows
    few = SMALLEST_MOVED // 8 // SIDE - 1
    assert moved(lambda x: x[:few] + 1) == 0  # may stay in caches


def test_a_device_computes_one_after_another() -> None:
    rank = RankPlan(
        0, (HeldRow("unit", "optimizer states", "device", 10**9),), (), (), flops={"bfloat16": 10**12}, moved=10**10
    )
    machine = load_machine("h100-sxm-80gb-x8")
    rows = {row.resource: row.seconds or 0.0 for row in step_bounds(rank, machine, world_size=1)}
    all_of_them = rows.pop("device, all it computes")
    assert all_of_them == sum(rows.values()) and len(rows) == 3
    assert rows["device memory, other operations"] == 10**10 / machine.need("device.memory_bandwidth")
    time = step_time(step_bounds(rank, machine, world_size=1))
    assert time.binding == "device, all it computes" and time.least == time.most == all_of_them


def test_plans_without_what_operations_move_can_be_read() -> None:
    data = RankPlan(0, (), (), (), moved=5).as_dict()
    assert RankPlan.from_dict(data).moved == 5
    del data["moved"]
    assert RankPlan.from_dict(data).moved == 0
