"""torch.jit modules inside a model train as in plain torch at every stage; state dicts hold them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from training import LR, Run, deviation

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
WIDTH, ROWS = 8, 6


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(x))))


class Outer(nn.Module):
    """A scripted and a traced module between plain ones; the scripted one is used twice, and its bias once more."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner, traced = Inner().double(), Inner().double()
        self.enter = nn.Linear(WIDTH, WIDTH).double()
        self.leave = nn.Linear(WIDTH, 1).double()
        self.blocks = nn.ModuleList([inner, Inner().double()])
        if scripted:
            self.blocks[0] = torch.jit.script(inner)
            traced = torch.jit.trace(traced, torch.ones(2, WIDTH, dtype=torch.float64))
        self.traced = traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        h = self.traced(self.blocks[0](h)) + self.blocks[0].second.bias
        return self.leave(h).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain() -> dict[str, torch.Tensor]:
    model = Outer(scripted=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(4):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def ours(stages: tuple[int, ...], tier: str, folder: str) -> list[Any]:
    found = []
    for stage in stages:
        engine = training.start(Run(), stage, Outer(scripted=True), **training.offload(stage, tier, folder))
        size = ROWS // dist.get_world_size()
        for step in range(4):
            engine.backward(engine(batch(step)[dist.get_rank() * size :][:size]))
            engine.step()
        absent = [name for name, tensor in engine.module.state_dict().items() if tensor.device.type == "meta"]
        weights = training.weights(engine)
        with engine.gathered(engine.module.parameters(), modifier_rank=0):
            state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
            engine.module.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
        doubled = training.weights(engine)
        engine.destroy()
        found.append((weights, absent, state, doubled))
    return found


@pytest.mark.parametrize(
    ("world_size", "stages", "tier"),
    [
        (1, (0, 3), "device"),
        (2, (0, 1, 2, 3), "device"),
        (3, (1, 3), "cpu"),
        (2, (2, 3), "nvme"),
        *(
            pytest.param(n, (0, 1, 2, 3), tier, marks=pytest.mark.soak)
            for n in (1, 2, 3)
            for tier in ("device", "cpu", "nvme")
        ),
    ],
)
def test_scripted_and_traced_submodules_train_as_in_plain_torch(
    world_size: int, stages: tuple[int, ...], tier: str, tmp_path: Path
) -> None:
    expected = plain()
    for found in run_ranks(ours, world_size, stages, tier, str(tmp_path)):
        for stage, (weights, absent, state, doubled) in zip(stages, found, strict=True):
            assert deviation(weights, expected) <= 1e-12, stage
            releases = stage == 3 and (world_size > 1 or tier == "nvme")
            assert ("blocks.0.first.weight" in absent) == releases
            assert deviation(state, expected) <= 1e-12
            assert deviation(doubled, {name: 2 * tensor for name, tensor in expected.items()}) <= 1e-12


def whole_model(stage: int) -> Any:
    torch.manual_seed(0)
    model = torch.jit.script(Inner().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        engine = zero_core.initialize(model=model, optimizer=optimizer, config=training.config(Run(), stage, 2))[0]
    except PartitionError as error:
        return str(error)
    for step in range(2):
        engine.backward(engine(batch(step)[dist.get_rank() * 3 :][:3]).square().mean())
        engine.step()
    return training.weights(engine)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_model_that_is_scripted_as_a_whole_trains_or_is_refused_by_name(stage: int) -> None:
    torch.manual_seed(0)
    model = Inner().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(whole_model, 2, stage):
        if stage == 3:
            assert "'first.weight' belongs to a torch.jit module" in found
        else:
            assert deviation(found, {name: p.detach() for name, p in model.named_parameters()}) <= 1e-12
