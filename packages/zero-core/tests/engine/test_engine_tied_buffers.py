"""Buffers that share memory, or are one buffer under several names: writes to one are writes to all, as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import adamw, config, distance, outcome, weights, without
from torch import nn

import zero_core
from zero_comm import run_ranks

SIZE = 6
DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
SECTIONS: dict[str, dict[str, Any]] = {
    "fp64": {"data_types": {"param_dtype": "fp64"}},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 1}, "data_types": {"buffer_dtype": "fp16"}},
}


class Shares(nn.Module):
    """Holds a buffer that another module holds under another name."""

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("shared", shared)


class Tied(nn.Module):
    """A transpose, a slice, an expanded element, one buffer in two modules, running statistics under a second name.

    Forward writes one of each two and reads the other. ``dtype``: of the buffers.
    """

    def __init__(self, dtype: torch.dtype, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        square, vector = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE + 1).to(dtype)
        self.register_buffer("square", square)
        self.register_buffer("turned", square.t())
        self.register_buffer("tail", vector[1:])
        self.register_buffer("vector", vector)
        self.register_buffer("one", torch.ones(1, dtype=dtype), persistent=False)
        self.register_buffer("many", self.one.expand(SIZE))
        self.register_buffer("mean", self.norm.running_mean)
        self.left = Shares(torch.full((SIZE,), 0.3, dtype=dtype))
        self.right = Shares(self.left.shared)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.square.mul_(0.5).add_(x.mean())
            self.vector[2].add_(0.25)
            self.one.mul_(1.25)
            self.right.shared.add_(x[0])
        h = torch.tanh(self.inner(x @ self.turned)) + self.tail * self.many
        return F.mse_loss(self.norm(h) * self.left.shared + self.mean, y)


def build(mode: str, dtype: torch.dtype, seed: int = 3) -> Tied:
    """A model in float64, or in float32 with buffers of ``dtype``."""
    torch.set_default_dtype(torch.float64 if mode == "fp64" else torch.float32)
    model = Tied(dtype, seed)
    torch.set_default_dtype(torch.float32)
    return model


def data(step: int, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch on every rank."""
    x, y = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.to(DTYPES[mode]), y if mode == "fp64" else y.float()


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: b.detach().clone().contiguous() for n, b in module.named_buffers(remove_duplicate=False)}


def settings(stage: int, mode: str) -> dict[str, Any]:
    return {**without(config(stage), "data_types"), "train_micro_batch_size_per_gpu": 5, **SECTIONS[mode]}


def plainly(mode: str, steps: int) -> dict[str, Any]:
    """The script without an engine: cast first, then its buffers are tied."""
    model = build(mode, DTYPES[mode])
    model.inner.to(DTYPES[mode])
    optimizer, found, losses = adamw(model), [], []
    for step in range(steps):
        loss = model(*data(step, mode))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        found.append(buffers(model))
    return {"buffers": found, "losses": losses, "weights": weights(model)}


def train(engine: zero_core.Engine, mode: str, first: int, last: int) -> tuple[list[float], list[dict[str, Any]]]:
    losses, found = [], []
    for step in range(first, last):
        loss = engine(*data(step, mode))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        found.append(buffers(engine.module))
    return losses, found


def in_engine(mode: str, stage: int, folder: str) -> dict[str, Any]:
    wide = torch.promote_types(DTYPES[mode], torch.float32)
    engine = zero_core.initialize(model=build(mode, wide), config=settings(stage, mode))[0]
    losses, found = train(engine, mode, 0, 2)
    engine.save_checkpoint(folder)
    copied = copy.deepcopy(engine.module)
    copied.vector.fill_(7)
    full = engine.consolidated_state_dict()
    losses, found = [a + b for a, b in zip((losses, found), train(engine, mode, 2, 4), strict=True)]
    whole = weights(engine)
    engine.destroy()
    other = zero_core.initialize(model=build(mode, wide, seed=4), config=settings(stage, mode))[0]
    other.load_checkpoint(folder)
    loaded = buffers(other.module)
    _, resumed = train(other, mode, 2, 4)
    return {
        "losses": losses,
        "buffers": found,
        "weights": whole,
        "loaded": loaded,
        "resumed": resumed,
        "copied": float(copied.tail.sum()),
        "state dict": full and {name: value for name, value in full.items() if name in loaded},
    }


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Return whether buffers are the same; in 16 bits without the statistics' values, which depend on weights."""
    dtypes = all(ours[name].dtype is theirs[name].dtype for name in ours)
    tied = torch.equal(ours["mean"], ours["norm.running_mean"])
    exact = [n for n in ours if n != "mean" and (ours["square"].dtype is torch.float64 or not n.startswith("norm."))]
    return dtypes and tied and all(torch.equal(ours[n], theirs[n]) for n in exact)


@pytest.mark.parametrize(
    ("stage", "world_size", "mode"),
    [
        (0, 1, "bf16"),
        (1, 2, "fp16"),
        (2, 3, "bf16"),
        (3, 2, "bf16"),
        (3, 3, "fp64"),
        *(
            pytest.param(stage, world_size, mode, marks=pytest.mark.soak)
            for stage in range(4)
            for world_size in (1, 2, 3)
            for mode in DTYPES
        ),
    ],
)
def test_buffers_that_share_memory_follow_one_another_as_in_plain_torch(
    stage: int, world_size: int, mode: str, tmp_path: Path
) -> None:
    plain = plainly(mode, 4)
    after = plain["buffers"]
    for rank, seen in enumerate(run_ranks(in_engine, world_size, mode, stage, str(tmp_path))):
        assert seen["losses"][0] == plain["losses"][0]
        assert all(map(same, seen["buffers"], after)) and seen["buffers"][0].keys() == after[0].keys()
        assert same(seen["loaded"], after[1]) and all(map(same, seen["resumed"], after[2:]))
        assert seen["copied"] == 7 * SIZE and (rank or same(seen["state dict"], after[1]))
        assert mode != "fp64" or distance(seen["weights"], plain["weights"]) <= 1e-12


def bits_of(model: nn.Module) -> None:
    model.register_buffer("number", torch.ones(4))
    model.register_buffer("bits", model.number.view(torch.int32)[1:])


def element_of_a_weight(model: nn.Module) -> None:
    model.scale = nn.Parameter(torch.ones(1))
    model.register_buffer("scales", model.scale.data.expand(4))


def conjugate(model: nn.Module) -> None:
    model.register_buffer("number", torch.polar(torch.ones(3), torch.arange(3.0)))
    model.register_buffer("bits", model.number.conj())


def tied_by(tie: Callable[[nn.Module], None], stage: int, mode: str, **changes: Any) -> str:
    model = nn.Sequential(nn.Linear(SIZE, SIZE))
    tie(model)
    chosen = {**settings(stage, mode), **changes} if mode else without(settings(stage, "bf16"), "bf16", "data_types")
    said = outcome(lambda: zero_core.initialize(model=model, config=chosen))
    if said == "no error":
        before = model.bits.clone()
        model.number.fill_(2)
        return "apart" if bool((model.bits == before).any()) else "tied"
    return f"{said} {model[0].weight.dtype}"


def other_ties(stage: int) -> dict[str, str]:
    kept = {"data_types": {"keep_in_fp32_modules": ["number"], "buffer_dtype": "bf16"}}
    return {
        "bits": tied_by(bits_of, stage, "bf16"),
        "bits in float32": tied_by(bits_of, stage, ""),
        "bits kept": tied_by(bits_of, stage, "bf16", **kept),
        "conjugate": tied_by(conjugate, stage, "bf16"),
        "weight": tied_by(element_of_a_weight, stage, "bf16"),
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_that_cannot_be_cast_for_all_that_share_it_is_refused_by_name_before_anything_changes(
    stage: int,
) -> None:
    for said in run_ranks(other_ties, 2, stage):
        assert "buffers 'number' (torch.float32) and 'bits' (torch.int32) share memory" in said["bits"]
        assert "parameter 'scale' and buffer 'scales' share memory" in said["weight"]
        assert said["bits"].endswith("torch.float32") and said["weight"].endswith("torch.float32")
        assert said["bits in float32"] == said["bits kept"] == said["conjugate"] == "tied"


class Hidden(nn.Module):
    """Writes buffers in ways that leave no trace on those that are seen: running statistics, an alias of `.data`."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE) if statistics else nn.Identity()
        self.register_buffer("seen", self.norm.running_mean[:4] if statistics else torch.zeros(4))
        self.register_buffer("alias", torch.empty(0) if statistics else self.seen.data, persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.alias.add_(x.mean())
        return F.mse_loss(self.norm(self.inner(x)), y)


def hidden_writes(statistics: bool, **changes: Any) -> str:
    """Train with other data on each rank."""
    chosen = {**without(settings(2, "fp64"), "data_types"), **changes}

    def attempt() -> None:
        engine = zero_core.initialize(model=Hidden(statistics), config=chosen)[0]
        for step in range(2):
            x, y = data(10 * step + torch.distributed.get_rank(), "fp64")
            engine.backward(engine(x.float(), y.float()))
            engine.step()

    return outcome(attempt)


@pytest.mark.parametrize("statistics", [True, False])
def test_an_audit_does_not_compare_buffers_in_memory_that_forward_writes(statistics: bool) -> None:
    assert run_ranks(partial(hidden_writes, audit_every=1), 2, statistics) == ["no error"] * 2


def test_under_virtual_ranks_a_write_to_what_shares_a_stored_buffers_memory_is_refused() -> None:
    for said in run_ranks(partial(hidden_writes, deterministic={"across_world_sizes": 2}), 2, False):
        assert "forward wrote the buffer 'alias'" in said
