"""A small transformer with a tied head, trained for a few steps, and what that put on the wire.

Run as a script, it is one rank of a job that a launcher's variables describe; the first rank prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import zero_core

WIDTH, BLOCKS, VOCABULARY, CONTEXT = 96, 4, 256, 16
PHASES = ("gather", "reduce", "publish")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_engine(stage: int, dtype: str, prefetch: int) -> zero_core.Engine:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": prefetch,
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return zero_core.initialize(model=Transformer(), config=config)[0]


def train_step(engine: zero_core.Engine, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    engine.backward(engine(torch.randint(VOCABULARY, (2, CONTEXT), generator=generator)))
    engine.step()


def bytes_per_step(stage: int, dtype: str, prefetch: int, steps: int = 3) -> list[dict[str, int]]:
    """Bytes that this rank sends in each step after the first two (the orders are learned in the first)."""
    engine = make_engine(stage, dtype, prefetch)
    rows = []
    for step in range(2 + steps):
        engine.ledger.reset()
        train_step(engine, step)
        rows.append({phase: engine.ledger.sent_bytes(phase) for phase in PHASES})
    engine.destroy()
    return rows[2:]


def elements() -> int:
    """Parameters of the model, the tied one counted once."""
    return sum(p.numel() for p in Transformer().parameters())


def kept_elements() -> int:
    """Parameters of the unit that stays gathered between forward and backward: that of the head, with two blocks."""
    model = Transformer()
    return sum(p.numel() for part in (model.embedding, *model.blocks[:2]) for p in part.parameters())


def loopback_bytes() -> int:
    """What the kernel has sent over the loopback device of this process's network namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("this network namespace has no loopback device")


def compare_with_kernel(steps: int) -> dict[str, dict[str, int]]:
    """For each stage, over ``steps`` steps of all ranks: the ledgers' sum and the kernel's count."""
    answers = {}
    for stage in range(4):
        engine = make_engine(stage, "fp32", 50_000_000)
        for step in range(2):
            train_step(engine, step)
        engine.ledger.reset()
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        for step in range(steps):
            train_step(engine, step)
        total = torch.tensor(engine.ledger.sent_bytes())
        dist.barrier()
        sent = loopback_bytes() - before
        dist.all_reduce(total)
        answers[str(stage)] = {"ledger": int(total), "kernel": sent}
        engine.destroy()
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = compare_with_kernel(steps=int(sys.argv[1]))
    if dist.get_rank() == 0:
        print(json.dumps(measured))
    dist.destroy_process_group()
