"""Models that `Engine.train_batch` refuses, and micro-batches of such steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from train_batch_runs import Block, Net, arguments, batches, llama


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


class Constant(Net):
    """Gives each block a constant as its scale."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.head(self.run_blocks(self.embed(ids))), ids)

    def run_blocks(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden, scale=torch.ones(()))
        return hidden


class Cut(Net):
    """Leaves its last block out for short inputs."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks[: 3 if ids.shape[1] > 4 else 2]:
            hidden = hidden + block(hidden, torch.ones(()))
        return next_token_loss(self.head(hidden), ids)


class Offset(Constant):
    """Uses a parameter of its own between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.head(self.run_blocks(self.embed(ids) + self.offset)), ids)


class Functional(Constant):
    """Computes with a block's weight outside of the block, as with a tied head without a module."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return next_token_loss(F.linear(self.run_blocks(self.embed(ids)), self.embed.weight), ids)


class Kept(Block):
    """Appends its output to a list that it is given."""

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        kept.append(super().forward(x, torch.ones(())))
        return kept[-1]


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        kept: list[torch.Tensor] = []
        for block in self.blocks:
            hidden = hidden + block(hidden, kept)
        return next_token_loss(self.head(hidden), ids)


class Recomputed(Net):
    """Checkpoints its blocks from outside."""

    reentrant = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, torch.ones(()), use_reentrant=self.reentrant)
        return next_token_loss(self.head(hidden), ids)


class RecomputedByNesting(Recomputed):
    reentrant = True


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor


class Wrapping(Block):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return Output(super().forward(x, torch.ones(())))


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.calls += 1
        return Output(super().forward(x, torch.ones(())) * self.calls).hidden


class Replacing(Block):
    """Replaces a buffer, from its second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.full((), torch.nan))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.calls += 1
        if self.calls > 1:
            self.mean = x.detach().mean()
        return super().forward(x, torch.ones(()))


class Keeping(Block):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        found = super().forward(x, torch.ones(()))
        self.penalty = found.square().mean()
        return found


class Of(Net):
    """Has blocks of another class. ``kind``: that class."""

    kind: type[Block] = Wrapping

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        for block in self.blocks:
            found = block(hidden)
            hidden = hidden + (found.hidden if isinstance(found, Output) else found)
        return next_token_loss(self.head(hidden), ids)


class Writing(Block):
    """Writes to what it is given."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return super().forward(x, scale)


class Counted(Block):
    """Writes to an argument without gradients."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x, scale.add_(1))


class Shifting(nn.Module):
    """Does not need its input in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + self.shift


class OfWriting(Constant):
    kind: type[Block] = Writing

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(2))


class OfCounted(OfWriting):
    kind = Counted


class Overwriting(Net):
    """Adds to the input of its blocks, which do not keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifting() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(ids)
        for block in self.blocks:
            hidden += block(hidden)
        return next_token_loss(self.head(hidden), ids)


class OfCounting(Of):
    kind = Counting


class OfReplacing(Of):
    kind = Replacing


class OfKeeping(Of):
    kind = Keeping


class Differentiating(Net):
    """Differentiates inside its forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        found = hidden + self.blocks[0](hidden, torch.ones(()))
        (slope,) = torch.autograd.grad(found.sum(), hidden, retain_graph=True)
        return next_token_loss(self.head(found + slope), ids)


def equal(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return batches(0)


def one_short(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return [ids[:, :4] if n == 1 else ids for n, ids in enumerate(batches(0))]


def rank_1_short(_model: nn.Module, rank: int) -> list[torch.Tensor]:
    return [ids[:, :4] if rank else ids for ids in batches(0)]


def two(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return batches(0)[:2]


def words(model: nn.Module, _rank: int) -> list[Any]:
    return [arguments(model, ids) for ids in batches(0)]


def out_of_range(_model: nn.Module, _rank: int) -> list[torch.Tensor]:
    return [ids + (30 if n == 2 else 0) for n, ids in enumerate(batches(0))]


def cached() -> nn.Module:
    model = llama()()
    model.config.use_cache = True
    return model


REFUSED: list[tuple[Callable[[], nn.Module], Callable[[nn.Module, int], list[Any]], list[str]]] = [
    (Net, two, ["UsageError", "gradient_accumulation_steps = 3", "got 2"]),
    (Cut, one_short, ["PartitionError", "micro-batch 0 runs module 'blocks.2' while micro-batch 1 runs module 'head'"]),
    (Offset, equal, ["PartitionError", "'offset'", "into a submodule"]),
    (Functional, equal, ["ReleasedParameterError", "train_batch: parameter 'embed.weight'", "between the modules"]),
    (Listed, equal, ["PartitionError", "module 'blocks.0' changed a list or a dict"]),
    (
        Recomputed,
        equal,
        ["PartitionError", "module 'blocks.2' is called again in backward", "gradient_checkpointing_d"],
    ),
    (RecomputedByNesting, equal, ["PartitionError", "module 'blocks.2' is called again in backward"]),
    (Of, equal, ["PartitionError", "module 'blocks.0' returned a Output"]),
    (OfCounting, equal, ["PartitionError", "module 'blocks.0' changed its buffer 'calls'"]),
    (OfReplacing, equal, ["PartitionError", "module 'blocks.0' changed its buffer 'mean'"]),
    (OfKeeping, equal, ["PartitionError", "module 'blocks.0' has kept a tensor of its forward as 'penalty'"]),
    (Differentiating, equal, ["PartitionError", "autograd.grad went through module 'blocks.0'"]),
    (
        OfWriting,
        equal,
        ["PartitionError", "module 'blocks.0' changed an argument that requires gradients", "x = x * 2"],
    ),
    (OfCounted, equal, ["PartitionError", "module 'blocks.0' changed argument ['scale'], a tensor of shape []"]),
    (Overwriting, equal, ["PartitionError", "module 'blocks.1' was called with has been changed", "hidden + output"]),
    (cached, words, ["PartitionError", "cache", "DynamicCache", "use_cache=False"]),
    (Net, out_of_range, ["IndexError"]),
]
