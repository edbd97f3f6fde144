"""A plan's work does not grow with the ranks, and grows with the blocks: a trillion parameters on 4,096 ranks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import dry_models
import pytest
from torch import nn

from zero_plan import plan
from zero_plan.dry_run.operations import Operations

CODED = (
    ("zero_hpz_partition_size", 8),
    ("zero_quantized_weights", True),
    ("zero_quantized_gradients", True),
)


def operations(blocks: int, world_size: int, monkeypatch: pytest.MonkeyPatch, zero: Any = ()) -> int:
    """Return how many operations on tensors a plan of the last rank runs; ``zero``: settings of zero_optimization."""
    found: Counter[str] = Counter()
    count = Operations.count

    def counted(self: Operations, *arguments: Any) -> None:
        found["operations"] += 1
        count(self, *arguments)

    def build() -> nn.Module:
        model = dry_models.Decoder(32)
        model.blocks = nn.ModuleList(dry_models.Block(32, 4, 2) for _ in range(blocks))
        return model

    case = dry_models.Case(settings=(("comm", {"ranks_per_node": 8}),), zero=zero)
    with monkeypatch.context() as patch:
        patch.setattr(Operations, "count", counted)
        plan(build, case.config(), batch=dry_models.tokens(), world_size=world_size, ranks=[world_size - 1])
    return found["operations"]


@pytest.mark.parametrize("zero", ((), CODED, CODED[1:2]))
def test_the_operations_of_a_plan_do_not_grow_with_the_number_of_ranks(
    zero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operations(2, 4096, monkeypatch, zero) <= operations(2, 64, monkeypatch, zero)


def test_the_operations_of_a_plan_grow_with_the_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    few, more, most = (operations(blocks, 64, monkeypatch) for blocks in (2, 4, 6))
    assert most - more == more - few > 0


PROGRAM = """
import resource, sys
import torch
from torch import nn
from torch.nn import functional as F
from zero_plan import plan

LAYERS, HIDDEN, HEADS, VOCABULARY, TOKENS = 128, 25_600, 160, 51_200, 2048


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, HIDDEN), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "comm": {"ranks_per_node": 8},
}
found = plan(Model, config, batch=torch.zeros(1, TOKENS, dtype=torch.long), world_size=4096)
moments = sum(row.nbytes for row in found.ranks[0].held if row.kind == "optimizer states")
used = resource.getrusage(resource.RUSAGE_SELF)
print(moments * 4096 / 8, (used.ru_utime + used.ru_stime) / len(found.ranks), used.ru_maxrss / 2**20)
"""


@pytest.mark.soak
def test_a_trillion_parameters_on_4096_ranks_take_a_minute_of_processor_time_for_a_rank_and_2_gib() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    parameters, seconds, gib = map(float, done.stdout.split())
    assert parameters > 1e12
    assert seconds <= 60 and gib <= 2
