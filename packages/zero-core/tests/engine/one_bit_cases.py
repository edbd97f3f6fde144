"""The 1-bit optimizers' algorithms as their papers have them, all ranks in one process on flat vectors; and the runs of
the engine that have to follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-6, 0.02
COMMON = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "OneBitAdam": ({"freeze_step": 3}, 8),
    "OneBitLamb": ({"freeze_step": 4, "coeff_beta": 0.7, "max_coeff": 0.5, "factor_threshold": 0.05}, 9),
    "ZeroOneAdam": (
        {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4},
        18,
    ),
}
"""Parameters besides `COMMON`, and how many steps show every phase."""


def build() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 5))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 20, generator=generator), torch.randn(8, 5, generator=generator)
    return (model(x) - y).square().mean()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def sizes() -> list[int]:
    return [p.numel() for p in build().parameters()]


def gradient(weights: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    model = build()
    with torch.no_grad():
        for p, part in zip(model.parameters(), weights.split(sizes()), strict=True):
            p.copy_(part.view_as(p))
    loss(model, rank, step).backward()
    return flat(p.grad for p in model.parameters())


class Feedback:
    """The compressed average of all ranks, their errors kept."""

    def __init__(self, world_size: int, numel: int) -> None:
        self.numel, self.size = numel, -(-numel // world_size)
        self.workers = torch.zeros(world_size, world_size, self.size)
        self.servers = torch.zeros(world_size, self.size)

    def __call__(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        world_size = len(tensors)
        if world_size == 1:
            return tensors[0]
        padding = self.size * world_size - self.numel
        sent = torch.empty_like(self.workers)
        for rank, x in enumerate(tensors):
            compensated = self.workers[rank] + torch.nn.functional.pad(x, (0, padding)).view(world_size, -1)
            sent[rank] = torch.stack([self.signs(row) for row in compensated])
            self.workers[rank] = compensated - sent[rank]
            self.workers[rank].view(-1)[self.numel :] = 0
        compensated = self.servers + sent.sum(0) / world_size
        answers = torch.stack([self.signs(row) for row in compensated])
        self.servers = compensated - answers
        self.servers.view(-1)[self.numel :] = 0
        return answers.view(-1)[: self.numel]

    @staticmethod
    def signs(x: torch.Tensor) -> torch.Tensor:
        blocks = [torch.where(block < 0, -block.abs().mean(), block.abs().mean()) for block in x.split(512)]
        return torch.cat(blocks)


class Oracle:
    """Weights of all ranks, and the moments they share."""

    def __init__(self, world_size: int) -> None:
        start = flat(build().parameters())
        self.weights = [start.clone() for _ in range(world_size)]
        self.m, self.v = torch.zeros_like(start), torch.zeros_like(start)
        self.average = Feedback(world_size, start.numel())

    def gradients(self, step: int) -> list[torch.Tensor]:
        return [gradient(w, rank, step) for rank, w in enumerate(self.weights)]

    def see(self, g: torch.Tensor) -> None:
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * g * g

    def momenta(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        return [BETAS[0] * self.m + (1 - BETAS[0]) * g for g in gradients]

    def direction(self, m: torch.Tensor, v: torch.Tensor, step: int, variance_steps: int) -> torch.Tensor:
        return (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** variance_steps)).sqrt() + EPS)

    def move(self, step: int, variance_steps: int) -> None:
        direction = self.direction(self.m, self.v, step, variance_steps)
        self.weights = [w - LR * (direction + DECAY * w) for w in self.weights]


def one_bit_adam(world_size: int, steps: int, freeze_step: int) -> Iterator[torch.Tensor | None]:
    oracle = Oracle(world_size)
    for step in range(1, steps + 1):
        gradients = oracle.gradients(step - 1)
        if step <= freeze_step:
            oracle.see(sum(gradients) / world_size)
        else:
            oracle.m = oracle.average(oracle.momenta(gradients)) * (oracle.v > 0)
        oracle.move(step, min(step, freeze_step))
        yield oracle.weights[0]


def one_bit_lamb(
    world_size: int, steps: int, freeze_step: int, coeff_beta: float, max_coeff: float, factor_threshold: float
) -> Iterator[torch.Tensor | None]:
    oracle, count = Oracle(world_size), len(sizes())
    frozen, last, scaling, fresh = [0.0] * count, [1.0] * count, torch.ones_like(oracle.m), oracle.v
    for step in range(1, steps + 1):
        gradients, earlier = oracle.gradients(step - 1), oracle.m
        if step <= freeze_step:
            oracle.see(sum(gradients) / world_size)
            fresh = oracle.v
        else:
            if step == freeze_step + 1:
                scales = [float(part.square().mean().sqrt()) for part in oracle.m.split(sizes())]
                united = sum(scales) / count
                parts = [torch.full((n,), united / s) for n, s in zip(sizes(), scales, strict=True)]
                scaling = torch.cat(parts)
            oracle.m = oracle.average([m * scaling for m in oracle.momenta(gradients)]) * (oracle.v > 0) / scaling
            rebuilt = (oracle.m - BETAS[0] * earlier) / (1 - BETAS[0])
            fresh = BETAS[1] * fresh + (1 - BETAS[1]) * rebuilt * rebuilt
        variance_steps = min(step, freeze_step)
        adam = oracle.direction(oracle.m, oracle.v, step, variance_steps)
        new = []
        w = oracle.weights[0]
        for i, (x, d, v, f) in enumerate(zip(*(t.split(sizes()) for t in (w, adam, oracle.v, fresh)), strict=True)):
            u = d + DECAY * x
            if step <= freeze_step:
                ratio = min(max(float(x.norm() / u.norm()), 0.01), max_coeff)
                frozen[i] = coeff_beta * frozen[i] + (1 - coeff_beta) * ratio
            else:
                above = (v / (1 - BETAS[1] ** variance_steps)).sqrt() + EPS
                below = (f / (1 - BETAS[1] ** step)).sqrt() + EPS
                share = min(1.0, float(d.norm() / u.norm()))
                factor = float((above / below).max()) * share + 1 - share
                factor = min(max(factor, 0.5), 4.0)
                last[i] = min(max(factor, last[i] * (1 - factor_threshold)), last[i] * (1 + factor_threshold))
                ratio = frozen[i] * last[i]
            new.append(x - LR * ratio * u)
        oracle.weights = [torch.cat(new)] * world_size
        yield oracle.weights[0]


def zero_one_adam(
    world_size: int,
    steps: int,
    var_freeze_step: int,
    var_update_scaler: int,
    local_step_scaler: int,
    local_step_clipper: int,
) -> Iterator[torch.Tensor | None]:
    """Yields None where ranks are apart."""
    oracle = Oracle(world_size)
    every, updates, interval, left, seen = 1, 0, 1, local_step_scaler, 0
    start, own, moved, rate, decay = oracle.weights[0], [oracle.m] * world_size, [oracle.m * 0] * world_size, 0.0, 1.0
    for step in range(1, steps + 1):
        gradients = oracle.gradients(step - 1)
        if step <= var_freeze_step:
            if step % every == 0:
                oracle.see(sum(gradients) / world_size)
                seen, updates = seen + 1, updates + 1
                if updates == var_update_scaler:
                    every, updates = every * 2, 0
            else:
                oracle.m = oracle.average(oracle.momenta(gradients)) * (oracle.v > 0)
            oracle.move(step, seen)
            start, own = oracle.weights[0], [oracle.m] * world_size
            yield start
            continue
        own = [BETAS[0] * m + (1 - BETAS[0]) * g for m, g in zip(own, gradients, strict=True)]
        here = LR / (1 - BETAS[0] ** step)
        rate, decay = rate + here, decay * (1 - LR * DECAY)
        moved = [u + here * m for u, m in zip(moved, own, strict=True)]
        denominator = (oracle.v / (1 - BETAS[1] ** seen)).sqrt() + EPS
        oracle.weights = [
            w * (1 - LR * DECAY) - here * m / denominator for w, m in zip(oracle.weights, own, strict=True)
        ]
        together = (step - var_freeze_step) % interval == 0
        if together:
            mean = oracle.average([u / rate for u in moved]) * (oracle.v > 0)
            start = start * decay - rate * mean / denominator
            oracle.weights, own = [start] * world_size, [mean] * world_size
            moved, rate, decay = [mean * 0] * world_size, 0.0, 1.0
        left -= 1
        if left == 0:
            interval, left = min(interval * 2, local_step_clipper), local_step_scaler
        yield start if together else None


ORACLES: dict[str, Callable[..., Iterator[torch.Tensor | None]]] = {
    "OneBitAdam": one_bit_adam,
    "OneBitLamb": one_bit_lamb,
    "ZeroOneAdam": zero_one_adam,
}


def start(name: str, **sections: Any) -> Any:
    parameters = {**COMMON, **CASES[name][0]}
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": name, "params": parameters},
        "zero_optimization": {"stage": 0},
        **sections,
    }
    return zero_core.initialize(model=build(), config=settings, device="cpu")[0]


def train(engine: Any, first: int, last: int) -> list[torch.Tensor]:
    """The weights after each step."""
    after = []
    for step in range(first, last):
        engine.backward(loss(engine, dist.get_rank(), step))
        engine.step()
        after.append(flat(engine.module.parameters()).clone())
    return after
