"""Parameters in float64 under a configuration that names no dtype stay so, as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import config, distance, weights, without
from torch import nn

import zero_core
from zero_comm import run_ranks


class Mixed(nn.Module):
    """One layer in float64 among float32, with the casts written out; or all in float64."""

    def __init__(self, *, wholly: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 48)
        self.fine = nn.Linear(48, 48).double()
        self.fine.bias.requires_grad_(False)
        self.last = nn.Linear(48, 2)
        if wholly:
            self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.fine(self.first(x.to(self.first.weight.dtype)).double()))
        return self.last(h.to(self.last.weight.dtype)).square().mean()


def made(wholly: bool) -> tuple[Mixed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed(wholly=wholly)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def samples(number: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number))


def plain(wholly: bool) -> dict[str, torch.Tensor]:
    model, optimizer = made(wholly)
    for step in range(3):
        for micro in range(2):
            model(samples(2 * step + micro)).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**weights(model), "moment": optimizer.state[model.fine.weight]["exp_avg"]}


def run(engine: zero_core.Engine, first: int, last: int) -> None:
    for number in range(2 * first, 2 * last):
        engine.backward(engine(samples(number)))
        engine.step()


def sharded(cases: list[tuple[int, str]], wholly: bool, folder: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage, tier in cases:
        settings: dict[str, Any] = without(config(stage), "optimizer", "data_types")
        settings.update(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
        settings["zero_optimization"]["unit_min_numel"] = 1
        if tier != "device":
            where = {"device": tier, **({"nvme_path": str(folder)} if tier == "nvme" else {})}
            settings["zero_optimization"]["offload_optimizer"] = where
            if stage == 3:
                settings["zero_optimization"]["offload_param"] = where
        for resumed in (False, True):
            model, optimizer = made(wholly)
            engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
            if resumed:
                engine.load_checkpoint(folder / f"{stage}{tier}")
                run(engine, 2, 3)
            else:
                run(engine, 0, 2)
                engine.save_checkpoint(folder / f"{stage}{tier}")
            values = {**weights(engine), "moment": engine.full_state(model.fine.weight, "exp_avg")}
            engine.destroy()
        found.append(values)
    return found


@pytest.mark.parametrize(
    ("world_size", "cases", "wholly"),
    [
        (2, [(3, "device"), (0, "device"), (3, "nvme")], False),
        (3, [(2, "cpu")], False),
        (1, [(1, "device")], True),
        (2, [(3, "device")], True),
    ],
)
def test_float64_parameters_stay_float64(
    world_size: int, cases: list[tuple[int, str]], wholly: bool, tmp_path: Path
) -> None:
    expected = plain(wholly)
    for answers in run_ranks(sharded, world_size, cases, wholly, tmp_path):
        for ours in answers:
            assert {name: value.dtype for name, value in ours.items()} == {n: v.dtype for n, v in expected.items()}
            assert distance(ours, expected) <= (1e-12 if wholly else 1e-6)


@pytest.mark.usefixtures("alone")
def test_a_dtype_that_the_configuration_names_is_that_of_all_parameters() -> None:
    model, optimizer = made(wholly=False)
    settings = {**without(config(1), "optimizer"), "data_types": {"param_dtype": "fp32"}}
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
