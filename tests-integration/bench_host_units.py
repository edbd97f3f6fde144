"""What the host does per unit in a step at stage 3, beside FSDP2: processor time without any transport.

    python tests-integration/bench_host_units.py [--units 32 145 577 1153] [--rounds 10]

One process is rank 0 of 8 in torch's fake process group, whose collectives move nothing. The model has as many linear
layers of 16 x 16 as units; FSDP2 shards every layer and the root. Contestants take steps in turn (forward, backward,
``torch.optim.AdamW(fused=True)``), on one thread. Printed: the median and the quartiles of the ratio of processor time
within a round, and microseconds per unit and step.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zero_comm import AlikeStore

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from bench_results import save

ZEROS = {"MALLOC_PERTURB_": "255"}
"""glibc fills new memory with zeros: gathers leave it as it is, and it should be numbers."""
SIDE, RANKS, WARM_UP, AIM = 16, 8, 4, 0.5
COLUMNS = ("units", "ours / FSDP2", "quartiles", "ours, us per unit", "FSDP2, us per unit", "aim")


def layers(units: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(units)))


def ours(units: int) -> Callable[[torch.Tensor], None]:
    import zero_core

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "unit_min_numel": 1, "stage3_param_persistence_threshold": 0},
    }
    model = layers(units)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=settings)[0]
    found = len(engine.partition.units)
    if found != units:
        raise RuntimeError(f"expected {units} units, got {found}")

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(x).sum())
        engine.step()

    return step


def fsdp2(units: int) -> Callable[[torch.Tensor], None]:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = layers(units)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(units: int, rounds: int) -> list[str]:
    """Return a row of the table."""
    steps = ours(units), fsdp2(units)
    x = torch.zeros(1, SIDE)
    seconds: list[list[float]] = [[], []]
    for turn in range(WARM_UP + rounds):
        for place in (0, 1) if turn % 2 else (1, 0):
            begin = time.process_time()
            steps[place](x)
            if turn >= WARM_UP:
                seconds[place].append(time.process_time() - begin)
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    per_unit = [f"{statistics.median(values) / units * 1e6:.0f}" for values in seconds]
    return [str(units), f"{middle:.2f}", f"{low:.2f} - {high:.2f}", *per_unit, f"{AIM:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[32, 145, 577, 1153])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if not ZEROS.items() <= os.environ.items():  # read when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ZEROS})
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = AlikeStore(RANKS)  # kept: torch holds its C++ half alone
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=store)
    rows: list[Any] = []
    for units in args.units:
        rows.append(compare(units, args.rounds))
        print("  ".join(rows[-1]), flush=True)
    dist.destroy_process_group()
    del store
    save(__file__, "host-units", COLUMNS, rows)


if __name__ == "__main__":
    main()
