"""What instruments cost: a training step with none, with a CSV monitor, with everything on; one rank, no accelerator.

`python bench_instruments.py` prints, beside the steps, the calls that an engine without instruments makes to nobody.
Steps are interleaved: one of each engine per repetition.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_core
from zero_core.instruments import PARTS, NoInstruments

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
from bench_results import save

COLUMNS = ("ratio", "median (quartiles)", "aim")
WIDTH, LAYERS, BATCH = 256, 4, 8
CALLS = 100_000


def engine(settings: dict[str, Any]) -> zero_core.Engine:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW"},
        "steps_per_print": 0,
        "zero_optimization": {"stage": 2},
        **settings,
    }
    return zero_core.initialize(model=nn.Sequential(*layers), config=config)[0]


def step(trained: zero_core.Engine, x: torch.Tensor) -> float:
    start = time.perf_counter()
    trained.backward(trained(x).square().mean())
    trained.step()
    return time.perf_counter() - start


def silent_calls() -> float:
    """Seconds that one step spends on calling instruments that are not there."""
    silent, loss = NoInstruments(), torch.zeros(())
    start = time.perf_counter()
    for _ in range(CALLS):
        for part in PARTS:
            with silent.during(part):
                pass
        silent.loss(loss)
        silent.after_step()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    """Print medians, ratios to the step without instruments, and their spread (quartiles)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=300)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    x = torch.randn(BATCH, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        csv = {"csv_monitor": {"enabled": True, "output_path": folder}}
        engines = {
            "none": engine({}),
            "none, again": engine({}),
            "csv monitor": engine(csv),
            "csv monitor and times": engine({**csv, "wall_clock_breakdown": True, "steps_per_print": 10**9}),
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        for repetition in range(repetitions + 20):
            for name, trained in engines.items():
                seconds = step(trained, x)
                if repetition >= 20:
                    times[name].append(seconds)
        for trained in engines.values():
            trained.destroy()
    base = statistics.median(times["none"])
    print(f"{'instruments':<24}{'step, ms':>10}{'ratio':>8}{'quartiles':>16}")
    spread = ""
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:<24}{statistics.median(seconds) * 1e3:>10.3f}{middle:>8.3f}{low:>9.3f}-{high:.3f}")
        if name == "csv monitor":
            spread = f"{middle:.2f} ({low:.2f} - {high:.2f})"
    calls = min(silent_calls() for _ in range(5))
    print(f"calls to no instrument: {calls * 1e6:.2f} us per step, {100 * calls / base:.3f} % of the step")
    took = f"a step of {base * 1e3:.2f} ms"
    silent = (
        f"calls to no monitor and no instrument / {took}",
        f"{calls * 1e6:.2f} us = {calls / base:.2%}",
        "not measurable",
    )
    save(__file__, "instruments", COLUMNS, [silent, (f"CSV monitor / none, {took}", spread, "")])


if __name__ == "__main__":
    main()
