"""Models in the channels-last memory format: handed in so, or moved to it after ``initialize``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import STAGES, config, distance, outcome, weights
from torch import nn

import zero_core
from zero_comm import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1)).square().mean()


def made(before: bool) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    return model.to(memory_format=torch.channels_last) if before else model


def images(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(2, 4, 4, 4, generator=generator, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if number % 2 else x


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


Found = dict[str, dict[str, torch.Tensor]]


def plain(before: bool) -> Found:
    model = made(before)
    optimizer = adam(model)
    for number in range(4):
        if number == 2:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(images(number)).backward()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"weights": weights(model), "gradients": gradients, "state dict": dict(model.state_dict())}


def sharded(stages: tuple[int, ...], folder: Path) -> list[tuple[int, bool, Found, str]]:
    found = []
    for stage in stages:
        for before in (True, False):
            model = made(before)
            settings = config(stage)
            del settings["optimizer"]
            settings["train_micro_batch_size_per_gpu"] = 2
            settings["zero_optimization"]["unit_min_numel"] = 1
            engine = zero_core.initialize(model=model, optimizer=adam(model), config=settings)[0]
            for number in range(4):
                if number == 2:
                    model.to(memory_format=torch.channels_last)
                engine.backward(engine(images(number)))
                gradients = {name: engine.full_grad(p) for name, p in model.named_parameters()}
                engine.step()
            refusal = outcome(lambda model=model: model.head.weight.to(memory_format=torch.channels_last))
            engine.save_checkpoint(folder, f"{stage}{before}")
            trained = weights(engine)
            engine.backward(engine(images(5)))
            engine.step()
            engine.load_checkpoint(folder, f"{stage}{before}")
            assert distance(weights(engine), trained) == 0
            states = engine.consolidated_state_dict()
            parts = {"weights": trained, "gradients": gradients, "state dict": trained if states is None else states}
            found.append((stage, before, parts, refusal))
            engine.destroy()
    return found


@pytest.mark.parametrize(("world_size", "stages"), [(1, STAGES), (2, STAGES), (3, (3,))])
def test_a_channels_last_model_trains_and_saves_as_in_one_process(
    world_size: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    expected = {before: plain(before) for before in (True, False)}
    for answers in run_ranks(sharded, world_size, stages, tmp_path):
        for stage, before, found, refusal in answers:
            for part, values in found.items():
                assert distance(values, expected[before][part]) <= 1e-12, (stage, before, part)
            assert "required rank 4" in refusal
