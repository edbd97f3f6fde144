"""Collectives of the user's between calls of the engine, while each rank needs other units than in passes before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_comm import run_ranks

ROWS, WIDTH, EXPERTS = 6, 8, 5

PLAN: list[list[list[int]]] = [  # by step and rank, the experts of the rank's batch, in order
    [[0, 1], [0, 1], [0, 1]],
    [[0, 1], [0, 1], [0, 1]],
    [[0, 1, 0], [0, 1], [0, 1]],
    [[0, 1], [1], [0]],
    [[2, 0], [1, 0], [4]],
    [[0], [3, 1, 3], []],
    [[4, 4], [], [3, 0]],
    [[1, 2], [2, 4, 2], [1, 2, 3, 4]],
]


class Routed(nn.Module):
    """Linears of which each call uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = self.enter(x)
        for number in chosen:
            x = x + torch.tanh(self.experts[number](x))
        return self.leave(x).square().mean()


def build() -> Routed:
    torch.manual_seed(5)
    return Routed().double()


def rows(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def one_process(world_size: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """By step, the losses' sums over the ranks in training and in evaluation; the weights after the last step."""
    model, sums = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, by_rank in enumerate(PLAN):
        losses = [model(rows(step, rank), by_rank[rank]) for rank in range(world_size)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            after = [model(rows(step, rank), by_rank[rank][::-1]) for rank in range(world_size)]
        sums.append(torch.stack([torch.stack(losses).sum().detach(), torch.stack(after).sum()]))
    return sums, {name: value.clone() for name, value in model.state_dict().items()}


def summed(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


def on_ranks(stage: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What `one_process` gives, with an all-reduce of each loss as soon as it is there."""
    model, rank, sums = build(), dist.get_rank(), []
    zero = {"stage": stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "data_types": {"param_dtype": "fp64"},
        "steps_per_print": 0,
        "zero_optimization": zero,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step, by_rank in enumerate(PLAN):
        chosen = by_rank[rank]
        loss = engine(rows(step, rank), chosen)
        in_training = summed(loss)
        engine.backward(loss)
        assert torch.equal(summed(loss), in_training)
        engine.step()
        with torch.no_grad():
            evaluated = summed(engine(rows(step, rank), chosen[::-1]))
        sums.append(torch.stack([in_training, evaluated]))
    weights = {name: engine.full_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return sums, weights


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_is_averaged_between_forward_and_backward_while_each_rank_needs_other_units(
    stage: int, world_size: int
) -> None:
    sums, weights = one_process(world_size)
    for found, state in run_ranks(on_ranks, world_size, stage, timeout=60.0):
        torch.testing.assert_close(found, sums, atol=1e-12, rtol=0)
        torch.testing.assert_close(dict(state), weights, atol=1e-12, rtol=0)


def in_synced() -> list[torch.Tensor]:
    """Rank r evaluates r + 1 batches of other experts, each loss sent to rank 0 as soon as it is there."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": {"stage": 3, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0},
    }
    engine = zero_core.initialize(model=build(), config=config)[0]
    losses = []
    with engine.synced(), torch.no_grad():
        for turn in range(rank + 1):
            losses.append(engine(rows(turn, rank), PLAN[turn][rank]))
    received = [torch.zeros(ranks, dtype=torch.float64) for _ in range(ranks)]
    dist.all_gather(received, torch.stack([*losses, *[losses[0] * 0] * (ranks - len(losses))]))
    engine.destroy()
    return received


def test_ranks_in_synced_evaluate_other_numbers_of_batches_with_other_units() -> None:
    model = build()
    with torch.no_grad():
        expected = [
            [model(rows(turn, rank), PLAN[turn][rank]).item() if turn <= rank else 0.0 for turn in range(3)]
            for rank in range(3)
        ]
    for received in run_ranks(in_synced, 3, timeout=60.0):
        assert [row.tolist() for row in received] == [pytest.approx(row, abs=1e-12) for row in expected]
