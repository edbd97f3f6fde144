"""A parameter without dimensions keeps its optimizer's states in checkpoints, at any other stage and tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_comm import run_ranks

PLACES: list[tuple[int, str]] = [(0, "none"), (1, "none"), (3, "none"), (2, "cpu")]


class Scaled(nn.Module):
    """A layer with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.temperature).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def plain(steps: int) -> dict[str, torch.Tensor]:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def resumed(folder: str, places: list[tuple[int, str]]) -> list[tuple[Any, float]]:
    """By first and second place of a run: the deviation from plain torch."""
    expected, found = plain(4), []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for first in places:
        for second in places:
            for number, (stage, tier) in enumerate((first, second)):
                model = Scaled()
                zero = {"stage": stage, "offload_optimizer": {"device": tier}, "unit_min_numel": 1}
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
                config = {"train_micro_batch_size_per_gpu": 4 // ranks, "zero_optimization": zero}
                engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
                if number:
                    engine.load_checkpoint(folder)
                for step in range(2 * number, 2 * number + 2):
                    engine.backward(engine(batch(step).chunk(ranks)[rank]))
                    engine.step()
                engine.save_checkpoint(folder)
                weights = {name: engine.full_param(p) for name, p in engine.module.named_parameters()}
                engine.destroy(unshard=False)
            found.append(((first, second), max(float((weights[n] - expected[n]).abs().max()) for n in expected)))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_with_a_parameter_without_dimensions_resumes_anywhere(world: int, tmp_path: Path) -> None:
    for places, deviation in run_ranks(resumed, world, str(tmp_path), PLACES)[0]:
        assert deviation < 1e-5, (places, deviation)
