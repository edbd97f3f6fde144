"""What ranks of the launcher's tests run: a stage-3 training that prints rank 0's losses, and can be disturbed.

Arguments: number of steps, folder for checkpoints or `-`, and what goes wrong: `nothing`, `kill` (rank 3 dies of
SIGKILL in the middle of the first attempt), `extra`, `skip` or `shape` (rank 1 diverges in step 3).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_core
from zero_comm import Tag

BAD_STEP = 3


def model() -> nn.Module:
    torch.manual_seed(7)
    layers = [layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Linear(12, 24), *layers, nn.Linear(24, 1))


def engine() -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 500,
            "unit_min_numel": 1,
        },
    }
    return zero_core.initialize(model=model(), config=config)[0]


def diverge(engine: Any, how: str, rank: int) -> None:
    """On rank 1, once, do another collective than the others, or none."""
    group = engine.partition.groups.gather
    flat = torch.zeros(group.world_size * 64)
    shard = torch.zeros(64)
    name = "decoder.norm.weight"
    if how == "extra" and rank == 1:
        group.all_gather(flat, shard, Tag("gather", "decoder.extra.weight", BAD_STEP)).wait()
    elif how == "skip":
        for part in ("decoder.0.weight", "decoder.1.weight", "decoder.2.weight"):
            if rank != 1 or part != "decoder.1.weight":
                group.all_gather(flat, shard, Tag("gather", part, BAD_STEP)).wait()
    elif how == "shape":
        size = 32 if rank == 1 else 64
        group.all_gather(flat[: group.world_size * size], shard[:size], Tag("gather", name, BAD_STEP)).wait()


def main() -> None:
    steps, folder, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    trained = engine()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = 0
    if folder != "-" and (Path(folder) / "latest").exists():
        first = trained.load_checkpoint(folder)[1]["step"]
    for step in range(first, steps):
        if how == "kill" and rank == 3 and step == BAD_STEP and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == BAD_STEP:
            diverge(trained, how, rank)
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(2 * world_size, 12, generator=generator)[2 * rank : 2 * rank + 2]
        loss = (trained(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        trained.backward(loss)
        trained.step()
        if rank == 0:
            print(f"loss {step} {loss.item()!r} {os.environ.get('FOO')}", flush=True)
        if folder != "-":
            trained.save_checkpoint(folder, client_state={"step": step + 1})
    trained.destroy()


if __name__ == "__main__":
    main()
