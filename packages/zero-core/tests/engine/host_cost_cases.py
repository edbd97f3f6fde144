"""How many Python functions a step calls for each layer of a model: what the host does, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

import zero_core

FEW, MANY = 10, 30


class Layer(nn.Module):
    """Three parameters and two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.scale


def calls_of(step: Callable[[], object]) -> int:
    """Python calls of one step, after some that learn."""
    for _ in range(5):
        step()
    count = 0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def plain_calls(layers: int) -> int:
    """Calls of a step with torch alone."""
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 4)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return calls_of(step)


def engine_calls(stage: int, layers: int) -> int:
    """Calls of a step of the engine, all of whose layers are one unit."""
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }
    engine = zero_core.initialize(model=model, config=config)[0]
    x = torch.randn(2, 4)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    count = calls_of(step)
    engine.destroy()
    return count


def calls_per_layer() -> list[float]:
    """More calls per layer than torch alone makes, by stage."""
    plain = plain_calls(MANY) - plain_calls(FEW)
    return [(engine_calls(stage, MANY) - engine_calls(stage, FEW) - plain) / (MANY - FEW) for stage in (0, 1, 2, 3)]
