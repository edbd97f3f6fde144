"""An optimizer that keeps lists of tensors in its states is saved, loaded elsewhere, and continues as in plain
torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import zero_core
from zero_comm import run_ranks

PLACES = [(stage, elementwise) for stage in (0, 1, 3) for elementwise in (False, True)]


class Averaging(Optimizer):
    """Steps by the mean of the last two gradients, and counts its steps in a number and in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["counts"] = [state.get("counts", [0])[0] + 1, 7]
                    state["nothing"] = None
                    state["history"] = [*state.get("history", [])[-1:], p.grad.clone()]
                    rate = group["lr"] / float(state["counts"][0])
                    p.add_(sum(state["history"]) / len(state["history"]), alpha=-rate)


class Elementwise(Averaging):
    """The same, which says that it treats elements one by one."""

    elementwise = True
    step = Averaging.step


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def start(stage: int, elementwise: bool) -> Any:
    model = build()
    optimizer = (Elementwise if elementwise else Averaging)(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "zero_optimization": {"stage": stage, "unit_min_numel": 1},
        "data_types": {"param_dtype": "fp64"},
    }
    return zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, first: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(first, first + 3):
        engine.backward(engine(batch(step).chunk(ranks)[rank]).square().mean())
        engine.step()


def plain() -> tuple[nn.Module, dict[str, Any]]:
    """The model after six steps, and the optimizer's state dict after three."""
    model = build()
    optimizer, kept = Averaging(model.parameters()), {}
    for step in range(6):
        if step == 3:
            kept = copy.deepcopy(optimizer.state_dict())
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, kept


def deviation(engine: Any) -> float:
    pairs = zip(engine.module.parameters(), plain()[0].parameters(), strict=True)
    return max(float((engine.full_param(p) - q.detach()).abs().max()) for p, q in pairs)


def resumed(folder: str) -> list[tuple[Any, float]]:
    found = []
    for number, place in enumerate(PLACES):
        engine = start(*place)
        train(engine, 0)
        engine.save_checkpoint(folder, tag=f"t{number}")
        engine.destroy(unshard=False)
        for other in (place, PLACES[(number + 3) % len(PLACES)]):
            engine = start(*other)
            engine.load_checkpoint(folder, tag=f"t{number}")
            train(engine, 3)
            found.append(((place, other), deviation(engine)))
            engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_lists_come_back_from_a_checkpoint(world: int, tmp_path: Path) -> None:
    for rank in run_ranks(resumed, world, str(tmp_path), timeout=120):
        assert all(difference < 1e-12 for _, difference in rank), rank


def loads_plain(states: dict[str, Any]) -> list[float]:
    found = []
    for place in PLACES:
        engine = start(*place)
        train(engine, 0)
        engine.optimizer.load_state_dict(copy.deepcopy(states))
        train(engine, 3)
        found.append(deviation(engine))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_lists_in_a_plain_state_dict_are_sharded(world: int) -> None:
    for rank in run_ranks(loads_plain, world, plain()[1]):
        assert max(rank) < 1e-12, rank


def refusal(folder: str) -> str:
    engine = start(1, True)
    train(engine, 0)
    if dist.get_rank() == 1:
        next(iter(dict.values(engine.optimizer.state)))["note"] = "text"
    try:
        engine.save_checkpoint(folder)
    except zero_core.UsageError as error:
        return str(error)
    finally:
        engine.destroy(unshard=False)
    return ""


def test_a_state_that_no_checkpoint_holds_is_refused_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(refusal, 2, str(tmp_path)):
        assert "'note' of parameter '" in said and "is a str" in said
