"""A small model, its data, and its training through DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_deepspeed.engine import DeepSpeedEngine
from zero_deepspeed.initialization import initialize

BATCH, WIDTH = 4, 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(number: int) -> torch.Tensor:
    """This rank's samples of batch ``number``."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    whole = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
    return whole[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    """AdamW and nothing persistent; ``changes`` replace whole sections."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }


def start(stage: int, model: nn.Module | None = None, **changes: Any) -> DeepSpeedEngine:
    """An engine over ``model`` (default: `build()`)."""
    return initialize(model=model if model is not None else build(), config=settings(stage, **changes))[0]


def train(engine: DeepSpeedEngine, first: int, last: int) -> list[float]:
    """One step per batch; this rank's losses."""
    losses = []
    for number in range(first, last):
        loss = engine(batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
