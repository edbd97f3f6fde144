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

STEPS, RANKS = 200, 4


def choice(step: int, rank: int) -> list[int]:
    """One to three different experts, in any order; different on every rank, from the first step on."""
    return random.Random(1000 * step + rank).sample(range(4), 1 + (step + rank) % 3)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, zoo.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


@functools.cache
def one_process() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = zoo.Experts().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for step in range(STEPS):
        for rank in range(RANKS):
            (model(rows(step, rank), choice(step, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def on_ranks(stage: int, prefetch: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    run = training.Run(steps=STEPS)
    engine = training.start(run, stage, zoo.Experts().double(), stage3_prefetch_bucket_size=prefetch)
    for step in range(STEPS):
        engine.backward(engine(rows(step, dist.get_rank()), choice(step, dist.get_rank())))
        engine.step()
    return training.weights(engine)


LONGER = [pytest.param(3, prefetch, marks=pytest.mark.soak) for prefetch in (300, 10**6)]


@pytest.mark.parametrize(("stage", "prefetch"), [(0, 0), (1, 0), (2, 0), (3, 0), *LONGER])
def test_random_experts_neither_hang_nor_drift(stage: int, prefetch: int) -> None:
    weights = run_ranks(on_ranks, RANKS, stage, prefetch)[0]
    assert training.deviation(weights, one_process()) <= 1e-12
