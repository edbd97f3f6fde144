"""Models that are awkward to partition, and the data they train on. Every model maps (x, y) to a list of losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH, BATCH = 13, 8, 5, 6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Tied head; options add what real models do to a partitioning runtime."""

    def __init__(
        self,
        *,
        frozen: bool = False,
        unused: bool = False,
        reuse: bool = False,
        recompute: str = "",
        scalar: bool = False,
        two_losses: bool = False,
        functional: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.reuse, self.recompute, self.two_losses, self.functional = reuse, recompute, two_losses, functional
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        if scalar:
            self.scale = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.empty(0))
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].norm.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        h = self.embedding(x)
        h = h + self.shift.to(h.dtype)
        for block in self.blocks:
            if self.recompute:
                h = checkpoint(block, h, use_reentrant=self.recompute == "reentrant")
            else:
                h = block(h)
        if self.reuse:
            h = self.blocks[0](self.blocks[1](h))
        if hasattr(self, "scale"):
            h = h * self.scale
        if self.functional:
            last = self.blocks[-1]
            h = h + F.linear(self.norm(h), last.up.weight[:WIDTH], last.down.bias)
            logits = F.linear(self.norm(h), self.embedding.weight)
        else:
            logits = self.head(self.norm(h))
        losses = [F.cross_entropy(logits.flatten(0, 1), y.flatten())]
        if self.two_losses:
            losses.append(h.square().mean())
        return losses


class Experts(nn.Module):
    """Experts chosen by a seed that differs by rank and step: ranks run different modules in different order."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        h = self.enter(x)
        for index in chosen:
            h = h + self.experts[index](h)
        return self.leave(h).square().mean()


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "frozen and unused": {"frozen": True, "unused": True},
    "reused": {"reuse": True, "scalar": True},
    "two losses": {"two_losses": True},
    "functional use": {"functional": True},
    "recomputed": {"recompute": "non-reentrant"},
    "recomputed reentrant": {"recompute": "reentrant"},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
}


def build(variant: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """A model of `VARIANTS`, or of several of them joined by " + "."""
    options = {key: value for name in variant.split(" + ") for key, value in VARIANTS[name].items()}
    torch.manual_seed(seed)
    return Transformer(**options).to(dtype)  # type: ignore[arg-type]


def batch(step: int, micro: int, rank: int = 0, world_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the micro-batch that all ranks share."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    y = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    rows = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    return x[rows], y[rows]
