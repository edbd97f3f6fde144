"""Ranks that run a unit's modules in different orders: what is bitwise equal between stages then, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run, bits, deviation

from zero_comm import run_ranks

STEPS = 6


def trained(stages: tuple[int, ...]) -> tuple[dict[int, dict[str, torch.Tensor]], dict[int, int]]:
    """Weights by stage, and how many units were reduced a second time, on a model whose units hold several experts."""
    found, late = {}, {}
    rank = dist.get_rank()
    for stage in stages:
        torch.manual_seed(0)
        engine: Any = training.start(Run(), stage, zoo.Experts().double(), unit_min_numel=300)
        counted: list[int] = []
        held = engine.partition.runtime.held_gradients
        reduce_late = held.reduce_late
        held.reduce_late = lambda units, counted=counted, then=reduce_late: (counted.append(len(units)), then(units))
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(4, zoo.WIDTH, generator=generator, dtype=torch.float64)
            engine.backward(engine(x, torch.randint(0, 4, (5,), generator=generator).tolist()))
            engine.step()
        found[stage], late[stage] = training.weights(engine), sum(counted)
        engine.destroy(unshard=False)
    return found, late


@pytest.mark.parametrize("world_size", (2, 3))
def test_stages_0_to_2_have_the_same_bits_and_stage_3_at_two_ranks_too(world_size: int) -> None:
    stages = (0, 1, 2, 3) if world_size == 2 else (0, 2, 3)
    for found, late in run_ranks(trained, world_size, stages):
        assert late[3] > late[0]
        for stage in stages:
            if stage < 3 or world_size == 2:
                assert bits(found[stage]) == bits(found[0]), stage
            assert deviation(found[stage], found[0]) <= 1e-15 * STEPS
