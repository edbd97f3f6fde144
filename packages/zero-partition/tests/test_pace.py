"""Ranks that compute different things in a backward pass: no gather waits for a reduction that waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_comm import Mesh, run_ranks
from zero_partition import PartitionOptions, ShardedOptimizer, UnitLimits, full_parameter, partition
from zero_precision import PrecisionPolicy

WIDTH, EXPERTS = 6, 6


class Chain(nn.Module):
    """Applies the experts that the caller names, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = self.experts[number](x)
        return x.square().mean()


def build() -> Chain:
    torch.manual_seed(0)
    return Chain().double()


def rows(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def one_process(plan: list[list[list[int]]]) -> list[torch.Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, by_rank in enumerate(plan):
        for rank, chosen in enumerate(by_rank):
            (model(rows(step, rank), chosen) / len(by_rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def on_ranks(plan: list[list[list[int]]], prefetch: int, copies: int = 1) -> dict[str, Any]:
    model = build()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = PartitionOptions(
        stage=3,
        policy=PrecisionPolicy.full(torch.float64),
        limits=UnitLimits(min_numel=1),
        alignment=1,
        prefetch_numel=prefetch,
    )
    mesh = Mesh(shard_size=dist.get_world_size() // copies, device=torch.device("cpu"))
    parts = partition(model, mesh.open_groups(), options)
    optimizer = ShardedOptimizer(inner, parts)
    started: list[int] = []
    late: list[int] = []
    held = parts.runtime.held_gradients
    reduce_late = held.reduce_late
    held.reduce_late = lambda units: (late.append(len(units)), reduce_late(units))  # type: ignore[assignment]
    for step, by_rank in enumerate(plan):
        model(rows(step, dist.get_rank()), by_rank[dist.get_rank()]).backward()
        started.append(parts.runtime.reducer.started)
        optimizer.step()
    return {"weights": [full_parameter(parts, p) for p in model.parameters()], "started": started, "late": late}


FORTH = list(range(EXPERTS))
BACK = FORTH[::-1]
PLANS = {
    "opposite after a common start": [[FORTH, FORTH], [FORTH, FORTH], [FORTH, BACK], [BACK, FORTH], [FORTH, FORTH]],
    "opposite from the first step": [[FORTH, BACK], [FORTH, BACK], [BACK, FORTH], [BACK, BACK]],
    "one does nothing of what the other does": [[[0, 1, 2], [5, 4, 3]], [[5], [0, 1, 2, 3, 4]], [[1], [1]]],
    "used again": [[FORTH, FORTH], [[0, 1, 2, 0, 1], [3, 4, 5]], [[0, 5, 0, 5], [5, 0, 5, 0]], [BACK, [2, 2]]],
    "three": [[FORTH, BACK, [2]], [FORTH, BACK, [3, 1]], [[5, 1], [1, 5], BACK], [[0], [0], FORTH]],
}


@pytest.mark.parametrize("prefetch", [0, 10**6])
@pytest.mark.parametrize("name", PLANS)
def test_nobody_hangs_and_every_gradient_counts(name: str, prefetch: int) -> None:
    plan = PLANS[name]
    expected = one_process(plan)
    for result in run_ranks(on_ranks, len(plan[0]), plan, prefetch, timeout=60.0):
        for ours, theirs in zip(result["weights"], expected, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-12


FOUR = [
    [FORTH, BACK, [2], [3, 1]],
    [[5, 1], FORTH, BACK, [1, 5]],
    [BACK, [0], FORTH, FORTH],
    [FORTH, [2, 2], BACK, BACK],
]


@pytest.mark.parametrize("prefetch", [0, pytest.param(10**6, marks=pytest.mark.soak)])
@pytest.mark.parametrize("copies", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_reductions_of_several_hops_hang_nobody_either(copies: int, prefetch: int) -> None:
    expected = one_process(FOUR * 2)
    for result in run_ranks(on_ranks, 4, FOUR * 2, prefetch, copies, timeout=60.0):
        for ours, theirs in zip(result["weights"], expected, strict=True):
            assert float((ours - theirs).abs().max()) < 1e-12


def test_ranks_that_compute_alike_reduce_every_unit_once() -> None:
    for result in run_ranks(on_ranks, 2, [[FORTH, FORTH]] * 4, 10**6):
        assert result["started"] == [EXPERTS] * 4 and not result["late"]
