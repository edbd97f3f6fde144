"""What it costs at stage 3 that a read of a released parameter brings it: a step with and without interception.

`python bench_interception.py [--rounds 60]`: two ranks of one thread; two engines in the same processes train equal
transformers, one with its modules' `_parameters` watched (as always), one with that taken off (this model needs no
interception, its modules own what they use). A round is one step of each, in an order that rotates; the ratio is taken
within a round. Beside it: how many reads a step makes, and what one costs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_comm import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from bench_results import save

COLUMNS = ("ratio", "median (quartiles)", "aim")
ROWS = {"on": ("interception on / off", "<= 1.02"), "on, again": ("the same engine again / off, for the noise", "")}
WARM_UP = 5
READS = 200_000


def make(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


def start(width: int, layers: int) -> zero_core.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return zero_core.initialize(model=make(width, layers), config=config)[0]


def step(engine: zero_core.Engine, x: torch.Tensor) -> float:
    dist.barrier()
    start_time = time.perf_counter()
    engine.backward(engine(x).square().mean())
    engine.step()
    dist.barrier()
    return time.perf_counter() - start_time


def count_reads(engine: zero_core.Engine, x: torch.Tensor) -> int:
    seen = 0

    def counting(on_read: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
        def counted(parameter: nn.Parameter) -> None:
            nonlocal seen
            seen += 1
            on_read(parameter)

        return counted

    watched = [m.__dict__["_parameters"] for m in engine.module.modules() if hasattr(m._parameters, "_on_read")]
    before = [w._on_read for w in watched]
    for w in watched:
        w._on_read = counting(w._on_read)
    step(engine, x)
    for w, on_read in zip(watched, before, strict=True):
        w._on_read = on_read
    return seen


def seconds_per_read(module: nn.Module) -> float:
    started = time.perf_counter()
    for _ in range(READS):
        _ = module.weight
    return (time.perf_counter() - started) / READS


def measure(rounds: int, width: int, layers: int, length: int) -> dict[str, Any]:
    engines = {"on": start(width, layers), "off": start(width, layers), "on, again": start(width, layers)}
    engines["off"].partition.runtime._interception.remove()
    x = torch.randn(2, length, width)
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(rounds + WARM_UP):
        for name in names[number % 3 :] + names[: number % 3]:
            seconds = step(engines[name], x)
            if number >= WARM_UP:
                times[name].append(seconds)
    reads = count_reads(engines["on"], x)
    norms = {name: engine.module.layers[0].norm1 for name, engine in engines.items()}
    each = min(seconds_per_read(norms["on"]) - seconds_per_read(norms["off"]) for _ in range(3))
    for engine in engines.values():
        engine.destroy()
    return {"times": times, "reads": reads, "each": each}


def main() -> None:
    """Print medians, ratios to the step without interception, and their spread (quartiles)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    found = run_ranks(measure, 2, args.rounds, args.width, args.layers, args.length, timeout=600)[0]
    base = found["times"]["off"]
    print(f"{'interception':<16}{'step, ms':>10}{'ratio':>8}{'quartiles':>16}")
    kept = []
    for name, seconds in found["times"].items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, base, strict=True)], n=4)
        print(f"{name:<16}{statistics.median(seconds) * 1e3:>10.2f}{middle:>8.3f}{low:>9.3f}-{high:.3f}")
        if name in ROWS:
            title, aim = ROWS[name]
            kept.append((title, f"{middle:.3f} ({low:.3f} - {high:.3f})", aim))
    share = found["reads"] * found["each"] / statistics.median(base)
    print(f"{found['reads']} reads per step at {found['each'] * 1e6:.2f} us more each: {100 * share:.3f} % of a step")
    reads = f"{found['reads']} x {found['each'] * 1e6:.2f} us = {share:.2%}"
    save(__file__, "interception", COLUMNS, [*kept, ("reads per step x cost of one / step", reads, "")])


if __name__ == "__main__":
    main()
