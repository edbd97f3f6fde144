"""A byte-level GPT in plain PyTorch: nothing in this file knows about sharding."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # every byte
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """The size of the model; the default has 10.9 million parameters."""

    layers: int = 6
    width: int = 384
    context: int = 128

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> Shape:
        """The size that a set of named weights was made with."""
        context, width = weights["positions.weight"].shape
        return cls(sum(name.endswith(".qkv.weight") for name in weights), width, context)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.width // HEAD_WIDTH
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next byte. `forward(x, y)` is the loss, `logits(x)` the prediction; x, y: (batch, time) integers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), y.flatten())


def read_text(path: Path | None) -> torch.Tensor:
    """The bytes of ``path``, or of the Python standard library's own sources: uint8, one dimension."""
    if path is not None:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    library = Path(sysconfig.get_paths()["stdlib"])
    elsewhere = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
    sources = [p for p in sorted(library.rglob("*.py")) if not elsewhere & set(p.relative_to(library).parts)]
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
