"""Train a small model; the first argument names a fault to plant in the run at stage 3, or says "none".

`zero-core verify` runs this file as a user's script, and so do the tests in this folder.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zero_core
from zero_comm import Group, Tag, Work

FAULT = sys.argv[1]
VICTIM = "blocks.1"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.enter(x))
        for block in self.blocks:
            h = h + F.dropout(torch.tanh(block(h)), 0.1)
        return F.mse_loss(self.head(h).float(), y)


class Wrapped:
    """A working group, for subclasses to spoil one of its calls."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class DropsReduction(Wrapped):
    """Keeps what this rank has instead of averaging."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        own = flat.view(self.group.world_size, -1)[self.group.rank]
        return Work(tag, finish=lambda: out.add_(own) if accumulate else out.copy_(own))


class DividesByOneMore(Wrapped):
    """Divides the sum over N ranks by N + 1."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, tag: Tag, *, accumulate: bool = False) -> Work:
        ranks = self.group.world_size
        return self.group.reduce_scatter(flat * (ranks / (ranks + 1)), out, tag, accumulate=accumulate)


class GathersOnce(Wrapped):
    """Gives the values of the first gather ever after."""

    first: torch.Tensor | None = None

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: Tag) -> Work:
        work = self.group.all_gather(out, shard, tag)
        work.wait()
        if self.first is None:
            self.first = out.clone()
        out.copy_(self.first)
        return work


def plant(engine: zero_core.Engine) -> None:
    """Exchange one part of a working engine for a faulty one."""
    (unit,) = (u for u in engine.partition.units if u.name.startswith(VICTIM))
    gradients: Any = engine.partition.runtime.gradients[unit.index]
    if FAULT == "dropped reduction":
        gradients._reduction = DropsReduction(gradients._reduction)
    elif FAULT == "wrong divisor":
        gradients._reduction = DividesByOneMore(gradients._reduction)
    elif FAULT == "unclipped shard" and dist.get_rank() == 1:
        engine.sharded_optimizer.clip = 0.0  # type: ignore[union-attr]
    elif FAULT == "stale gather" and dist.get_rank() == 1:
        unit.route._group = GathersOnce(unit.route._group)  # type: ignore[assignment]


def main() -> None:
    with zero_core.Init(config="given by the test"):
        model = Net()
    engine = zero_core.initialize(model=model, config="given by the test")[0]
    if FAULT == "fails":
        raise SystemExit(3)
    if FAULT == "does not repeat":
        torch.seed()
    elif engine.zero_optimization_stage() == 3:
        plant(engine)
    for number in range(100):
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
        loss = engine(x.to(next(engine.module.parameters()).dtype), y)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
