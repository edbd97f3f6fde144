"""A model whose modules the script calls one by one, instead of or beside the engine, trains as in plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_comm import run_ranks

ROWS, WIDTH = 3, 8
PLANS = ("whole parts", "parts parts", "parts whole", "whole whole parts whole parts parts")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.block(self.enter(x))))


def build() -> Net:
    torch.manual_seed(1)
    return Net().double()


def rows(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)


def loss_of(model: Net, top: nn.Module, how: str, x: torch.Tensor) -> torch.Tensor:
    out = top(x) if how == "whole" else model.head(torch.tanh(model.block(model.enter(x))))
    return out.square().mean()


def plain(plan: str, world_size: int, accumulation: int) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, how in enumerate(plan.split()):
        for rank in range(world_size):
            (loss_of(model, model, how, rows(number, rank)) / accumulation / world_size).backward()
        if (number + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def start(model: nn.Module, stage: int, accumulation: int, unit_min_numel: int) -> zero_core.Engine:
    zero = {"stage": stage, "unit_min_numel": unit_min_numel, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "data_types": {"param_dtype": "fp64"},
        "zero_optimization": zero,
    }
    return zero_core.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)[0]


def sharded(plan: str, accumulation: int, stage: int, through_engine: bool) -> dict[str, torch.Tensor]:
    model = build()
    engine = start(model, stage, accumulation, 1)
    for number, how in enumerate(plan.split()):
        loss = loss_of(model, engine, how, rows(number, dist.get_rank()))
        if through_engine:
            engine.backward(loss)
        else:
            (loss / accumulation).backward()
        engine.step()
    return {name: engine.full_param(p).clone() for name, p in model.named_parameters()}


def all_plans(stage: int) -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    cases = itertools.product(PLANS, (False, True))
    return {(plan, how): sharded(plan, 3 if len(plan) > 20 else 2, stage, how) for plan, how in cases}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_of_an_accumulation_may_go_through_the_engine_or_module_by_module(
    stage: int, world_size: int
) -> None:
    for found in run_ranks(all_plans, world_size, stage, timeout=60.0):
        for (plan, _), weights in found.items():
            expected = plain(plan, world_size, 3 if len(plan) > 20 else 2)
            torch.testing.assert_close(weights, expected, atol=1e-12, rtol=0, msg=lambda text, p=plan: f"{p}: {text}")


class Gated(nn.Module):
    """Uses a parameter of its own between its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(torch.tanh(x) * self.gate)))


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.head = nn.Linear(4, WIDTH), Gated(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, nested: bool | None) -> torch.Tensor:
        h = self.enter(x)
        if nested is not None:
            h = checkpoint(self.block, h, use_reentrant=nested)
        return self.head(h).square().mean()


def recomputed(nested: bool, unit_min_numel: int) -> float:
    """Largest difference of a weight from plain torch's, when the block joins in the second micro-batch."""
    torch.manual_seed(2)
    model, reference = Changing().double(), Changing().double()
    reference.load_state_dict(model.state_dict())
    engine = start(model, 3, 2, unit_min_numel)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for number, how in enumerate([None, nested, nested, None]):
        engine.backward(engine(rows(number, dist.get_rank()), how))
        engine.step()
        for rank in range(dist.get_world_size()):
            (reference(rows(number, rank), how) / 2 / dist.get_world_size()).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((engine.full_param(p) - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("unit_min_numel", [1, 10_000])
@pytest.mark.parametrize("nested", [False, True])
def test_a_block_that_joins_later_may_be_computed_again_in_backward(nested: bool, unit_min_numel: int) -> None:
    assert max(run_ranks(recomputed, 2, nested, unit_min_numel, timeout=60.0)) < 1e-12
