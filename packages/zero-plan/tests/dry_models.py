"""Models whose dry runs are compared with real ones, and what ranks of a real run return."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from zero_offload._memory import anonymous_memory
from zero_offload.ends import HostUse, tier_ends

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


def frozen_decoder() -> nn.Module:
    """A decoder whose embedding and first block are not trained."""
    model = Decoder()
    for part in (model.embedding, model.blocks[0]):
        part.requires_grad_(False)
    return model


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

    def config(self, folder: str = "/nvme") -> dict[str, Any]:
        """Return the configuration; ``folder``: of offload to NVMe."""
        zero = {
            key: {**value, "nvme_path": folder} if isinstance(value, dict) and value["device"] == "nvme" else value
            for key, value in self.zero
        }
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            **dict(self.settings),
            "zero_optimization": {
                "stage": self.stage,
                "stage3_param_persistence_threshold": 0,
                "unit_min_numel": 1,
                **zero,
            },
            "offload": {"create": True},
        }


class Measured(NamedTuple):
    """The bytes that a rank of a real run held after its steps, sent in the last, has in files, took of host memory for
    tiers, and read from files and wrote to them in the last step."""

    held: tuple[tuple[Any, ...], ...]
    sent: tuple[tuple[Any, ...], ...]
    files: dict[str, int]
    host: int
    moved: tuple[int, int]


class CountedEnds:
    """Real memory and one real engine for files, counted."""

    def __init__(self) -> None:
        from zero_nvme_aio import Engine

        self.engine = Engine(queue_depth=4)
        self.taken = 0

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        if not use.on_device:
            self.taken += nbytes
        return anonymous_memory(nbytes)

    def io_engine(self, given: Any) -> Any:
        return self.engine

    def moved(self) -> tuple[int, int]:
        counters = self.engine.counters()
        return counters["bytes_read"], counters["bytes_written"]


def train(cases: list[Case], folder: str = "", steps: int = 3) -> list[Measured]:
    """Train each case on this job's ranks, with its files in ``folder``."""
    return [_train(case, Path(folder) / str(number), steps) for number, case in enumerate(cases)]


def _train(case: Case, folder: Path, steps: int) -> Measured:
    import zero_core
    from zero_core.instruments import memory_rows

    torch.manual_seed(0)
    ends = CountedEnds()
    with tier_ends(ends):
        engine = zero_core.initialize(model=case.model(), config=case.config(str(folder)))[0]
        for _ in range(steps):
            engine.ledger.reset()
            _flush(engine)
            before = ends.moved()
            for _ in range(case.accumulation):
                engine.backward(engine(**tokens()))
                engine.step()
        _flush(engine)
        moved = tuple(now - then for now, then in zip(ends.moved(), before, strict=True))
        rows = [tuple(row) for row in memory_rows(engine.partition, engine.sharded_optimizer)]
        sent = [(phase, name, r.calls, r.sent_bytes, r.across_bytes) for phase, name, r in engine.ledger]
        own = re.compile(rf".*\.rank{engine.partition.data_rank}[.-].*extents")
        files = {path.name: path.stat().st_size for path in folder.rglob("*") if own.fullmatch(path.name)}
        engine.destroy(unshard=False)
    return Measured(tuple(rows), tuple(sent), files, ends.taken, moved)


def _flush(engine: Any) -> None:
    """Wait until everything is on its tier."""
    for tier in (engine.partition.residency, engine.partition.states):
        if tier is not None:
            tier.flush()
