"""Weights that code reads where no module announces it: as in plain torch, or refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import STAGES, adamw, config, distance, weights
from torch import nn

import zero_core
from zero_comm import run_ranks

WIDTH, STEPS, SAMPLES = 12, 3, 6
DTYPES = (torch.float64, torch.bfloat16)
SOAK = pytest.mark.soak


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In 16 bits sums are taken in float32."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class SkipsBiasAdd(nn.Linear):
    """Gives its bias to whoever called it, as Megatron's parallel layers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        return nn.functional.linear(x, self.weight), self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = SkipsBiasAdd(WIDTH, 2 * WIDTH), SkipsBiasAdd(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, bias = self.up(x)
        h, last = self.down(torch.tanh(h + bias))
        return x + h, last  # added a level higher still


class Model(nn.Module):
    """What its forward does besides calling its modules is chosen by ``inside``."""

    def __init__(self, inside: str = "") -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spare = nn.Linear(WIDTH, WIDTH)  # never called
        self.head = nn.Linear(WIDTH, 3)
        self.inside = inside
        weight = self.spare.weight
        self.closure = lambda x: x @ weight.t()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h, bias = block(h)
            h = h + bias
        more = torch.zeros((), dtype=wide(h).dtype)
        if self.inside == "iteration":
            more = sum((0.01 * wide(p).norm() for p in self.parameters()), more)
        elif self.inside == "closure":
            h = self.closure(h)
        elif self.inside == "functional_call":
            names = {name: p * 0.5 for name, p in self.head.named_parameters()}
            h = h + torch.func.functional_call(self.head, names, h).sum(-1, keepdim=True)
        elif self.inside == "detached":
            more = 0.1 * sum(wide(p.detach()).square().mean() * wide(h).mean() for p in self.spare.parameters())
        elif self.inside == "own function":
            h = Doubled.apply(h, self.spare.weight)
        return nn.functional.mse_loss(wide(self.head(h)), wide(y).to(wide(h).dtype)) + more


class Doubled(torch.autograd.Function):
    """An operation of the user's, whose parameter torch does not look at."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        return 2 * gradient @ weight.t(), 2 * x.t() @ gradient


def decay_of_one(model: Model) -> torch.Tensor:
    return 0.01 * wide(model.blocks[1].up.weight).pow(2).sum()


def decay_of_all(model: Model) -> torch.Tensor:
    return sum((0.01 * wide(p).norm() for p in model.parameters()), torch.zeros(()))


def never_called(model: Model) -> torch.Tensor:
    return 0.1 * (wide(model.spare.weight) @ wide(model.head.weight).t()).square().mean()


def flattened(model: Model) -> torch.Tensor:
    return 0.01 * wide(nn.utils.parameters_to_vector(model.blocks[0].parameters())).abs().sum()


def foreach(model: Model) -> torch.Tensor:
    return 0.01 * torch.stack(torch._foreach_norm([wide(p) for p in model.head.parameters()])).sum()


LOSSES: dict[str, Callable[[Model], torch.Tensor]] = {
    "decay of one": decay_of_one,
    "decay of all": decay_of_all,
    "never called": never_called,
    "flattened": flattened,
    "foreach": foreach,
}
INSIDE = ("", "iteration", "closure", "functional_call", "detached", "own function")
CASES = [*(("", loss) for loss in LOSSES), *((inside, "") for inside in INSIDE)]


def build(inside: str, dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model(inside).to(dtype)


def loss_of(model: Model, call: Callable[..., torch.Tensor], loss: str, number: int, rows: slice) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)[rows]
    y = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)[rows]
    value = call(x.to(next(model.parameters()).dtype), y)
    return value + LOSSES[loss](model) if loss else value


def trained(inside: str, loss: str, stage: int, dtype: torch.dtype, zero: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after some steps, and the bytes that are still gathered."""
    model = build(inside, torch.float64 if dtype == torch.float64 else torch.float32)
    section = {} if dtype == torch.float64 else {"bf16": {"enabled": True}, "data_types": {}}
    size, rank = SAMPLES // dist.get_world_size(), dist.get_rank()
    settings = config(stage, train_micro_batch_size_per_gpu=size, **section)
    settings["zero_optimization"] |= {"unit_min_numel": 1, **zero}
    engine = zero_core.initialize(model=model, config=settings)[0]
    for number in range(STEPS):
        engine.backward(loss_of(model, engine, loss, number, slice(rank * size, (rank + 1) * size)))
        engine.step()
    live = sum(u.flat.untyped_storage().nbytes() for u in engine.partition.units if u.releasable)
    found = {**weights(engine), "still gathered": torch.tensor(float(live))}
    engine.destroy(unshard=False)
    return found


def alone(inside: str, loss: str) -> dict[str, torch.Tensor]:
    model = build(inside, torch.float64)
    optimizer = adamw(model)
    for number in range(STEPS):
        loss_of(model, model, loss, number, slice(None)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**weights(model), "still gathered": torch.zeros(())}


def deviations(
    stage: int, dtype: torch.dtype, tier: str, folder: str, cases: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    """By case, the distance from the run of one process; in bf16, from stage 0, or 1 on a tier: no sharded weights."""
    states, shards = offload(tier, folder)
    zero = states | (shards if stage == 3 else {}) if stage else {}
    found = {}
    for inside, loss in cases:
        ours = trained(inside, loss, stage, dtype, zero)
        if dtype == torch.float64:
            found[inside, loss] = distance(ours, alone(inside, loss))
        else:
            found[inside, loss] = distance(ours, trained(inside, loss, 1 if zero else 0, dtype, states if zero else {}))
    return found


def offload(tier: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections that keep states, and shards, on ``tier``."""
    where = {"device": tier, "nvme_path": folder} if tier == "nvme" else {"device": tier}
    return ({}, {}) if tier == "device" else ({"offload_optimizer": where}, {"offload_param": where})


OFTEN = [
    (3, 2, torch.float64, "device", CASES),
    (3, 3, torch.bfloat16, "device", CASES[::2]),
    (2, 2, torch.bfloat16, "device", CASES[1::5]),
    (1, 1, torch.float64, "device", CASES[::4]),
    (0, 3, torch.float64, "device", CASES[2::5]),
    (3, 2, torch.bfloat16, "nvme", CASES[::5]),
    (3, 3, torch.float64, "cpu", CASES[1::4]),
    (1, 2, torch.float64, "nvme", CASES[3::6]),
]
COMBINATIONS = [
    pytest.param(stage, ranks, dtype, tier, CASES, marks=SOAK)
    for stage in STAGES
    for ranks in (1, 2, 3)
    for dtype in DTYPES
    for tier in ("device", *(("cpu", "nvme") if stage else ()))
]


@pytest.mark.parametrize(("stage", "ranks", "dtype", "tier", "cases"), [*OFTEN, *COMBINATIONS])
def test_weights_count_wherever_code_reads_them_in_a_training_pass(
    stage: int, ranks: int, dtype: torch.dtype, tier: str, cases: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    for found in run_ranks(deviations, ranks, stage, dtype, tier, str(tmp_path), cases, timeout=300):
        wrong = {case: d for case, d in found.items() if not d <= (1e-12 if dtype == torch.float64 else 0.0)}
        assert not wrong
