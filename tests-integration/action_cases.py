"""Random small models, their optimizers and batches: what a seed decides before the first action."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_optim_kernels.torch import CPUSGD, CPUAdamW

ROWS = 6  # of a batch over all ranks; divisible by every world size tried
ALL_ACTIONS = 1_000_000  # the first seed whose sequence draws from all actions; those below stay as they were kept
JOINS_AT = 5e-3  # the learning rate of the parameter that joins later


class Mistake(ValueError):
    """What the user's own module raises when it is told to."""


@dataclass(frozen=True)
class Case:
    """What a seed decides before the first action."""

    seed: int
    stage: int
    widths: tuple[int, ...]
    normed: bool
    tied: bool
    unused: bool
    late: str
    optimizer: str
    accumulation: int
    unit_min_numel: int
    persistence: int
    tier: str
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def on_a_tier(self) -> bool:
        """Return whether the optimizer's states are not on the device."""
        return self.tier != "device" and self.stage > 0

    @property
    def has_new_actions(self) -> bool:
        """Return whether the sequence draws from all actions."""
        return self.seed >= ALL_ACTIONS

    def twin(self) -> Case:
        """The same on the lowest stage that has its kernels, without disks: in 16 bits, what it has to equal."""
        return replace(self, stage=int(self.on_a_tier), tier="cpu" if self.on_a_tier else "device")

    @classmethod
    def of(cls, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
        """Draw the case of ``seed``, the same in every dtype and on every device."""
        rng = random.Random(f"case {seed}")
        width = rng.choice((3, 4, 5))
        lates = ("none", "trainable", "frozen") + ("listed",) * (seed >= ALL_ACTIONS)
        return cls(
            seed=seed,
            stage=rng.randrange(4),
            widths=tuple([width] * rng.randint(2, 4)),
            normed=rng.random() < 0.5,
            tied=rng.random() < 0.3,
            unused=rng.random() < 0.3,
            late=rng.choice(lates),
            optimizer=rng.choice(("adamw", "sgd")),
            accumulation=rng.choice((1, 1, 2)),
            unit_min_numel=rng.choice((1, 30, 1000)),
            persistence=rng.choice((0, 0, 10)),
            tier=rng.choice(("device", "device", random.Random(f"tier {seed}").choice(("cpu", "nvme")))),
            dtype=dtype,
            device=device,
        )


class Block(nn.Module):
    """A linear layer whose forward can be told to fail."""

    def __init__(self, width_in: int, width_out: int, normed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width_in) if normed else nn.Identity()
        self.linear = nn.Linear(width_in, width_out)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise Mistake("the user's forward fails")
        return torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """A stack of blocks; the last can share its weight with the first, and ``late`` starts outside the optimizer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        widths = case.widths
        self.blocks = nn.ModuleList(Block(a, b, case.normed) for a, b in pairwise(widths))
        self.late = nn.Linear(widths[-1], widths[-1], bias=False)
        if case.late == "frozen":
            self.late.requires_grad_(False)
        self.head = nn.Linear(widths[-1], widths[0])
        if case.tied:
            self.head.weight = self.blocks[0].linear.weight
        if case.unused:
            self.unused = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        return (self.head(h + self.late(h)) - y).square().mean()


def build(case: Case) -> Model:
    """The case's model; the same values at every call."""
    torch.manual_seed(case.seed)
    return Model(case).to(case.device, case.dtype)


def groups_of(case: Case, model: Model) -> list[dict[str, Any]]:
    """Return the param groups: without the parameter that joins later, or with it in a group of its own."""
    late = model.late.weight if case.late != "none" else None
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p is not late]}]
    if case.late == "listed":
        groups.append({"params": [late], "lr": JOINS_AT})
    return groups


def optimizer_over(case: Case, groups: list[dict[str, Any]], *, kernels: bool = False) -> Optimizer:
    """The case's optimizer; ``kernels``: the class with the arithmetic of the tiers."""
    if case.optimizer == "adamw":
        return (CPUAdamW if kernels else torch.optim.AdamW)(groups, lr=1e-2, weight_decay=0.1)
    return (CPUSGD if kernels else torch.optim.SGD)(groups, lr=1e-1, momentum=0.9)


def batch(case: Case, number: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank's rows of batch ``number``."""
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    width = case.widths[0]
    x = torch.randn(ROWS, width, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, width, generator=generator, dtype=torch.float64)
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return x[rows].to(case.device, case.dtype), y[rows].to(case.device, case.dtype)


def parameter_number(model: Model, number: int) -> nn.Parameter:
    """A parameter by number, counted round the model."""
    parameters = [p for p in model.parameters() if p.numel() > 1]
    return parameters[number % len(parameters)]
