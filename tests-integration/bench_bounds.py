"""The least time of a step that zero-plan says, beside the time of real steps on this machine.

    python tests-integration/bench_bounds.py [--only RUN] [--steps 6] [--folder PATH]

Three runs of a GPT in float32 on one process: two that are bound by what the device computes, of 57 million parameters
and of 115 million in half as many layers of twice the width; and one that keeps the states of the former on a drive and
computes little. The machine is probed first. The status is 1 where a bound is
above the fastest step, or more than 25 % below the median. Nothing else may run beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "examples"))

import torch
from model import GPT, Shape

import zero_core
from zero_plan import Machine, StepTime, plan, step_bounds, step_time
from zero_plan.probe import probe

LEARNING = 2  # steps in which the engine learns its orders
WITHIN = 0.25


class Run(NamedTuple):
    """A run to measure. ``batch``: sequences of ``tokens`` tokens; ``nvme``: states on a drive."""

    batch: int
    tokens: int
    nvme: bool
    layers: int = 8
    width: int = 768


RUNS = {
    "compute": Run(4, 512, nvme=False),
    "wide": Run(4, 512, nvme=False, layers=4, width=1536),
    "disk": Run(1, 16, nvme=True),
}


def configuration(run: Run, folder: str) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": run.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, **({"offload_optimizer": drive, "offload_param": drive} if run.nvme else {})},
        "steps_per_print": float("inf"),
    }


def model(run: Run) -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT(Shape(layers=run.layers, width=run.width, context=run.tokens))


def planned(run: Run, folder: str, machine: Machine) -> StepTime:
    tokens = torch.zeros(run.batch, run.tokens, dtype=torch.long)
    [rank] = plan(lambda: model(run), configuration(run, folder), batch=(tokens, tokens), world_size=1).ranks
    rows = step_bounds(rank, machine, world_size=1)
    for row in rows:
        print(f"  {row.resource}: {row.amount:.4g} at {row.rate or 0:.4g} / s, {row.seconds or 0:.2f} s")
    return step_time(rows)


def measured(run: Run, folder: str, steps: int) -> list[float]:
    engine = zero_core.initialize(model=model(run), config=configuration(run, folder))[0]
    found = []
    for step in range(LEARNING + steps):
        pieces = torch.randint(256, (run.batch, run.tokens + 1), generator=torch.Generator().manual_seed(step))
        begin = time.perf_counter()
        engine.backward(engine(pieces[:, :-1], pieces[:, 1:]))
        engine.step()
        found.append(time.perf_counter() - begin)
    engine.destroy(unshard=False)
    return found[LEARNING:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="RUN", choices=RUNS, help=f"one of {', '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=6, help="to measure, after those in which the engine learns")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the drive to be used")
    args = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        begin = time.perf_counter()
        machine = probe(disk=folder)
        print(f"probed in {time.perf_counter() - begin:.0f} s\n{machine.as_toml()}")
        chosen = {name: run for name, run in RUNS.items() if args.only in (None, name)}
        bounds = {name: planned(run, folder, machine) for name, run in chosen.items()}  # before an engine is made
        for name, run in chosen.items():
            bound = bounds[name]
            times = measured(run, folder, args.steps)
            median, least = statistics.median(times), min(times)
            ratio, highest = bound.least / median, bound.least / least
            print(
                f"{name}: at least {bound.least:.2f} s, bound by {bound.binding}; measured {median:.2f} s "
                f"({least:.2f} - {max(times):.2f}); bound / measured {ratio:.2f} (at most {highest:.2f})",
                flush=True,
            )
            missed += not (ratio >= 1 - WITHIN and highest <= 1)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
