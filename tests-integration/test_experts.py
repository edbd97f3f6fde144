"""Ranks that run different modules: nobody hangs, and the result is the one-process run's."""

from __future__ import annotations

import functools
import random

import pytest
import torch
import torch.distributed as dist
import training
import zoo

from zero_comm import run_ranks

LONG = 200
"""Steps of the soak run; orders that differ between ranks come up in each of the first ones already."""


def choice(step: int, rank: int) -> list[int]:
    """One to three different experts, in any order; different on every rank, from the first step on."""
    return random.Random(1000 * step + rank).sample(range(4), 1 + (step + rank) % 3)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, zoo.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


@functools.cache
def one_process(steps: int, ranks: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = zoo.Experts().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for step in range(steps):
        for rank in range(ranks):
            (model(rows(step, rank), choice(step, rank)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def on_ranks(stage: int, prefetch: int, steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    run = training.Run(steps=steps)
    engine = training.start(run, stage, zoo.Experts().double(), stage3_prefetch_bucket_size=prefetch)
    for step in range(steps):
        engine.backward(engine(rows(step, dist.get_rank()), choice(step, dist.get_rank())))
        engine.step()
    return training.weights(engine)


EVERYWHERE = [(0, 0), (1, 0), (2, 0), (3, 0)]
LONGER = [
    pytest.param(stage, prefetch, LONG, 4, marks=pytest.mark.soak)
    for stage, prefetch in (*EVERYWHERE, (3, 300), (3, 10**6))
]


@pytest.mark.parametrize(("stage", "prefetch", "steps", "ranks"), [*((*case, 24, 3) for case in EVERYWHERE), *LONGER])
def test_random_experts_neither_hang_nor_drift(stage: int, prefetch: int, steps: int, ranks: int) -> None:
    weights = run_ranks(on_ranks, ranks, stage, prefetch, steps)[0]
    assert training.deviation(weights, one_process(steps, ranks)) <= 1e-12
