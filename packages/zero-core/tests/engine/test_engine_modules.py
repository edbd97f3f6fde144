"""Modules as people build them, at stage 3: each trains as it does in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_cases import RANKS, STAGES, adamw, batch, build, config, distance, outcome, plain, start, train, weights
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import zero_core
from zero_comm import run_ranks

WIDTH = 128


class Attention(nn.Module):
    """MultiheadAttention reads its out_proj's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        sequence = torch.stack([h, h.roll(1, -1), h.roll(2, -1)], 1)
        return self.inner(sequence, sequence, sequence, need_weights=False)[0].mean(1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.stack([h, h.roll(1, -1)], 1)).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.stack([h, h.roll(1, -1)], 1))[0].mean(1)


class Containers(nn.Module):
    """Parameters in a list and a dictionary, one of them 0-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 12 for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.ones(WIDTH), "scale": torch.ones(())})

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            h = torch.tanh(h @ matrix)
        return h * self.named["gain"] * self.named["scale"]


class Strides(nn.Module):
    """Parameters that are not laid out in C order."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter((torch.randn(WIDTH, WIDTH + 3) / 12).t()[:WIDTH])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.convolution(h.view(-1, 8, 4, 4)).flatten(1) @ self.transposed


class Functional(nn.Module):
    """Calls a child with other parameters than its own, computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        doubled = {"weight": self.inner.weight * 2, "bias": self.inner.bias * 2}
        return torch.func.functional_call(self.inner, doubled, (h,))


class Penalty(nn.Module):
    """Differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = self.inner(h)
        (slope,) = torch.autograd.grad(out.square().sum(), h, create_graph=True)
        return out + slope / 10


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.table((h[:, 0] * 100).long().abs() % 50)


class Structured(nn.Module):
    """Returns a dictionary of tuples, and takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def split(self, *, h: torch.Tensor) -> dict[str, Any]:
        return {"pair": (self.first(h), [self.second(h)])}

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = self.split(h=h)
        return out["pair"][0] + out["pair"][1][0]


BODIES = {
    "attention": Attention,
    "encoder": Encoder,
    "LSTM": Recurrent,
    "parameter containers": Containers,
    "strides": Strides,
    "functional call": Functional,
    "gradient penalty": Penalty,
    "sparse embedding": SparseTable,
    "structured outputs": Structured,
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


class Model(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDTH)
        self.body = BODIES[body]()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.body(torch.tanh(self.enter(x)))), y)


def model(body: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(body).double()


def trained(body: str) -> Any:
    """Train with units as small as they can be, so that every module is one of its own."""
    made = model(body)
    settings = config(3)
    settings["zero_optimization"].update(unit_min_numel=0, stage3_prefetch_bucket_size=20_000)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    engine = zero_core.initialize(model=made, optimizer=optimizer, config=settings)[0]

    def steps() -> None:
        for number in range(3):
            engine.backward(engine(*batch(number)))
            engine.step()

    error = outcome(steps)
    return weights(engine) if error == "no error" else error


@pytest.mark.parametrize("body", BODIES)
def test_modules_of_all_kinds_train_as_in_one_process(body: str) -> None:
    reference = model(body)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for number in range(3):
        reference(*batch(number, whole=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = run_ranks(trained, RANKS, body)[0]
    assert not isinstance(ours, str), ours
    assert distance(ours, weights(reference)) <= 1e-12


def one_loss(stage: int) -> list[dict[str, torch.Tensor]]:
    first, second = start(stage), start(stage, build(seed=1))
    for number in range(2):
        loss = first(*batch(number)) + 2 * second(*batch(number + 5))
        first.backward(loss)
        first.step()
        second.step()
    return [weights(first), weights(second)]


@pytest.mark.parametrize("stage", STAGES)
def test_one_loss_may_train_two_engines(stage: int) -> None:
    one, two = build(), build(seed=1)
    optimizers = [adamw(one), adamw(two)]
    for number in range(2):
        (one(*batch(number, whole=True)) + 2 * two(*batch(number + 5, whole=True))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for seen in run_ranks(one_loss, RANKS, stage):
        assert distance(seen[0], weights(one)) <= 1e-12 and distance(seen[1], weights(two)) <= 1e-12


class Late(nn.Module):
    """A model that gets one more module, with a weight that another one has too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.extra: nn.Module | None = None

    def attach(self) -> None:
        self.extra = nn.Linear(self.inner.blocks[0].in_features, 1, bias=False)
        self.extra.weight = self.inner.blocks[1].weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.inner(x, y)
        return loss if self.extra is None else loss + self.extra(torch.tanh(self.inner.enter(x))).square().mean()


def attached_late(stage: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = Late()
    engine = start(stage, model)
    train(engine, 0, 1)
    model.attach()
    train(engine, 1, 3)
    result = weights(engine)
    engine.destroy()
    return result, sorted({type(m._parameters).__name__ for m in model.modules()})


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_attached_late_shares_a_weight_that_is_there_when_it_runs(stage: int) -> None:
    model = Late()
    optimizer = adamw(model)
    plain(model, optimizer, 0, 1)
    model.attach()
    plain(model, optimizer, 1, 3)
    for ours, kinds in run_ranks(attached_late, RANKS, stage):
        assert distance(ours, weights(model)) <= 1e-12 and kinds == ["dict"]


class InThreads(nn.Module):
    """Two layers that run beside each other, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            a, b = (pool.submit(layer, x) for layer in (self.a, self.b))
        return self.c(a.result() + b.result()).square().mean() + self.empty.sum()


def runs_in_threads(stage: int) -> tuple[str, list[int]]:
    module = InThreads()
    settings = config(stage)
    engine = zero_core.initialize(model=module, optimizer=adamw(module), config=settings)[0]
    said = outcome(lambda: (engine.backward(engine(torch.ones(2, 6, dtype=torch.float64))), engine.step()))
    shape = list(engine.full_param(module.empty).shape) if stage < 3 else [0]
    engine.destroy(unshard=False)
    return said, shape


@pytest.mark.parametrize("stage", [2, 3])
def test_modules_that_run_in_threads_train_or_are_refused_by_name(stage: int) -> None:
    for said, shape in run_ranks(runs_in_threads, 2, stage):
        assert shape == [0]
        if stage < 3:
            assert "module '" not in said, said
        else:
            assert "module '" in said and "in another thread" in said, said
