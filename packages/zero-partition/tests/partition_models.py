"""Models and parts that several tests of this package use; module level, so that worker processes can import it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_comm import Control, EngineGroups, Group, Mesh
from zero_partition import Partition, PartitionOptions, UnitLimits, partition
from zero_precision import PrecisionPolicy


class Stack(nn.Module):
    """Blocks of odd sizes between an embedding and a head that share one weight."""

    def __init__(self, blocks: int = 3, width: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 13), nn.Tanh(), nn.Linear(13, width)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)).square().mean()


def tokens(seed: int = 0) -> torch.Tensor:
    """A batch that is the same on every rank."""
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))


def groups() -> EngineGroups:
    """The process groups of one engine over the ranks that run, or of a single rank without torch.distributed."""
    if dist.is_initialized():
        return Mesh(device=torch.device("cpu")).open_groups()
    return EngineGroups(gather=Group(None), reduce=Group(None), control=Control(None))


def cut(
    model: nn.Module, stage: int, policy: PrecisionPolicy | None = None, limits: UnitLimits | None = None, **more: Any
) -> Partition:
    """``model`` cut at ``stage`` in float64, every parameter releasable."""
    chosen = policy if policy is not None else PrecisionPolicy.full(torch.float64)
    options = PartitionOptions(stage=stage, policy=chosen, limits=limits or UnitLimits(min_numel=1), alignment=4)
    return partition(model, groups(), options, **more)


def make(blocks: int = 3, seed: int = 0) -> Stack:
    """A `Stack` in float64 with the same weights wherever it is made."""
    torch.manual_seed(seed)
    return Stack(blocks).double()


def gathered_bytes(parts: Partition) -> int:
    """Bytes of the flat buffers that are present now."""
    return sum(u.flat.untyped_storage().nbytes() for u in parts.units if u.releasable)
