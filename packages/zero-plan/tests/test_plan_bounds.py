"""The least time of a step of a plan: what its operations move, and what a device computes one after another."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from zero_plan import load_machine, step_bounds, step_time
from zero_plan.cli.machine_printing import bounds_table
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


def test_attention_counts_at_a_rate_of_its_own_if_the_machine_gives_one() -> None:
    def attend(query: torch.Tensor) -> None:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)

    operations = Operations()
    with PlanMode(LiveMemory(), operations):
        query = torch.empty(2, 3, 64, 32)
        attend(query)
        query.view(-1, 32) @ query.new_empty(32, 16)
    forward, product = 2 * 2 * (2 * 3 * 64 * 64 * 32) // 2, 2 * (2 * 3 * 64) * 32 * 16
    assert operations.attention_by_dtype == {"float32": forward}
    assert operations.flops_by_dtype == {"float32": forward + product}
    rank = RankPlan(0, (), (), (), flops=operations.flops_by_dtype, attention=operations.attention_by_dtype)
    machine = load_machine("dgx-2").with_values({"device.fp32": "1 MFLOP/s"})
    [row] = step_bounds(rank, machine, world_size=1)
    assert row.amount == forward + product
    rows = step_bounds(rank, machine.with_values({"device.attention_fp32": "1 kFLOP/s"}), world_size=1)
    found = {row.resource: row.seconds for row in rows}
    both = {"matrix products, float32": product / 1e6, "attention, float32": forward / 1e3}
    assert found == {**both, "device, all it computes": sum(both.values())}
    amounts = {cells[0]: cells[1] for cells in bounds_table(rows, step_time(rows)).rows}
    assert amounts["attention, float32"].endswith("FLOP") and amounts["matrix products, float32"].endswith("FLOP")
    operations.clear()
    assert not operations.attention_by_dtype


def test_plans_without_what_later_versions_count_can_be_read() -> None:
    data = RankPlan(0, (), (), (), moved=5, attention={"float32": 1}).as_dict()
    assert RankPlan.from_dict(data).moved == 5 and RankPlan.from_dict(data).attention == {"float32": 1}
    del data["moved"], data["attention"]
    assert RankPlan.from_dict(data).moved == 0 and not RankPlan.from_dict(data).attention
