"""One rank of a job that trains a model of ``BLOCKS`` blocks.

``_memory_training.py STAGE BLOCKS GROUP [DRIVE [SHAPE]]``

With ``DRIVE`` (a folder) the model is built inside `Init` and everything that can be lives in files there. ``SHAPE`` is
``deep`` (layers one after the other; the default), ``wide`` (one layer of as many elements) or ``tiled`` (that layer in
tiles). Prints, as JSON on one line, the model's elements, its data segment and the memory charged to its control group
``GROUP`` (where it is one).
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from _memory_limits import anonymous_bytes, peak_bytes
from torch import nn

import zero_core

WIDTH = 1024


def build(shape: str, blocks: int) -> nn.Module:
    """A model of ``blocks`` x (WIDTH x WIDTH weights and WIDTH biases)."""
    if shape == "wide":
        return nn.Linear(WIDTH, blocks * WIDTH)
    if shape == "tiled":
        return zero_core.TiledLinear(WIDTH, blocks * WIDTH, out_splits=blocks)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)))


def main(stage: int, blocks: int, group: Path, drive: str | None = None, shape: str = "deep") -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nvme = {"device": "nvme", "nvme_path": drive}
    offload = {"offload_optimizer": {**nvme, "buffer_count": 3}, "offload_param": {**nvme, "buffer_count": 3}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 2 * WIDTH * WIDTH,
            "sub_group_size": WIDTH * WIDTH,
            **(offload if drive else {}),
        },
    }
    with zero_core.Init(config) if drive else nullcontext():
        model = build(shape, blocks)
    engine = zero_core.initialize(model=model, config=config)[0]
    losses = []
    for _ in range(2):
        loss = (engine(torch.ones(2, WIDTH)) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    facts = {
        "elements": engine.partition.layout.used_numel,
        "data": psutil.Process().memory_info().data,
        **({"anonymous": anonymous_bytes(group), "peak": peak_bytes(group)} if group.is_dir() else {}),
        "losses": losses,
    }
    print(json.dumps(facts), flush=True)
    dist.barrier()  # not `engine.destroy`, which gives the whole model back to every rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
