"""Models whose dry runs are compared with real ones, and what ranks of a real run return."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, SEQUENCE, BATCH = 250, 24, 2


class Block(nn.Module):
    """A pre-norm block of a decoder: grouped attention without biases, a gated feed-forward."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, heads * self.head, bias=False)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        query = self.query(h).view(batch, length, self.heads, self.head).transpose(1, 2)
        key, value = self.key_value(h).view(batch, length, 2, self.kv_heads, self.head).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        h = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A Llama of two blocks with its loss; ``tied``: the head is the embedding. The head of 250 rows and the norm do
    not divide evenly by 3 or 4 ranks."""

    def __init__(self, width: int = 32, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 4, 2) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Branching(nn.Module):
    """Asks for a value in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y.sum() if y.sum() > 0 else y.mean()


def decoder() -> nn.Module:
    return Decoder()


def tied_decoder() -> nn.Module:
    return Decoder(tied=True)


def tokens() -> dict[str, torch.Tensor]:
    drawn = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"tokens": drawn, "targets": drawn}


class Case(NamedTuple):
    """One run, planned and done."""

    model: Any = decoder
    stage: int = 3
    accumulation: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **dict(self.settings),
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                "unit_min_numel": 1,
                **dict(self.zero),
            },
        }


class Measured(NamedTuple):
    """The bytes that a rank of a real run held after its steps, and sent in the last."""

    held: tuple[tuple[Any, ...], ...]
    sent: tuple[tuple[Any, ...], ...]


def train(cases: list[Case], steps: int = 3) -> list[Measured]:
    """Train each case on this job's ranks."""
    import zero_core
    from zero_core.instruments import memory_rows

    found = []
    for case in cases:
        torch.manual_seed(0)
        engine = zero_core.initialize(model=case.model(), config=case.config())[0]
        for _ in range(steps):
            engine.ledger.reset()
            for _ in range(case.accumulation):
                engine.backward(engine(**tokens()))
                engine.step()
        rows = [tuple(row) for row in memory_rows(engine.partition, engine.sharded_optimizer)]
        sent = [(phase, name, r.calls, r.sent_bytes, r.across_bytes) for phase, name, r in engine.ledger]
        found.append(Measured(tuple(rows), tuple(sent)))
        engine.destroy(unshard=False)
    return found
