"""A byte-level GPT in plain PyTorch: nothing in this file knows about sharding."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # every byte
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """The size of the model; the default has 10.8 million parameters."""

    layers: int = 6
    width: int = 384
    context: int = 128  # bytes that a prediction looks back in training


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, section 3.2.2) of x: (batch, heads, time, HEAD_WIDTH)."""
    half = HEAD_WIDTH // 2
    rates = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


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
        q, k = (rotate(F.rms_norm(t, (HEAD_WIDTH,))) for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Predicts the next byte. `forward(x, y)` is the loss, `logits(x)` the prediction; x, y: (batch, time) integers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.width % HEAD_WIDTH:
            raise ValueError(f"width: expected a multiple of {HEAD_WIDTH}, got {shape.width}")
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(x)
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
