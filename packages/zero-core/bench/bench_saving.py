"""How long training stands still for a checkpoint that is written behind it, beside one that it waits for.

`python bench_saving.py [--rounds 5] [--cases 0,3 nvme]`: one process with as many threads as cores; for every stage
and tier, two engines of equal models train in turn, one with `checkpoint.writer.decoupled` and one without, and a third
keeps a copy in the nodes' memory (`checkpoint.in_memory`). A round is one save and the steps behind it of each engine.
Standing still is the time inside `save_checkpoint` (for copies in memory: what the step took longer than steps without)
and the time that the next step waits for the copy. Beside it: by how much the steps until the checkpoint was whole took
longer, which is the price of sharing cores, memory and disk. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_core
from zero_comm import run_ranks

CASES = {
    "0": (0, None, None),
    "1": (1, None, None),
    "2": (2, None, None),
    "3": (3, None, None),
    "2 cpu": (2, "cpu", None),
    "3 cpu": (3, "cpu", "cpu"),
    "2 nvme": (2, "nvme", None),
    "3 nvme": (3, "nvme", "nvme"),
    "3 nvme, saved elsewhere": (3, "nvme", "nvme"),
}


def make(folder: Path, case: str, bf16: bool, width: int, layers: int, checkpoint: dict[str, Any]) -> zero_core.Engine:
    stage, optimizer, param = CASES[case]
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    for key, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        if device is not None:
            zero[key] = {"device": device, **({"nvme_path": tempfile.mkdtemp(dir=folder)} if device == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
        "checkpoint": checkpoint,
    }
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return zero_core.initialize(model=model, config=config)[0]


class Job:
    """One engine, and what a round of it takes."""

    def __init__(self, engine: zero_core.Engine, x: torch.Tensor) -> None:
        self.engine, self.x = engine, x

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and those of them that it waited for a copy."""
        begin = time.perf_counter()
        self.engine.backward(self.engine(self.x).float().square().mean())
        before = time.perf_counter()
        self.engine.partition.readers.wait()  # which `step` would do
        waited = time.perf_counter() - before
        self.engine.step()
        return time.perf_counter() - begin, waited

    def save(self, root: Path, plain: float, steps: int) -> tuple[float, float]:
        """Seconds that training stood still for a save, and those that the steps behind it took longer."""
        begin = time.perf_counter()
        self.engine.save_checkpoint(root, tag="t")
        still = time.perf_counter() - begin
        taken = [self.step() for _ in range(steps)]
        self.engine._parts.checkpoints.wait()
        still += sum(waited for _, waited in taken)
        return still, sum(seconds for seconds, _ in taken) - steps * plain


def measure(root: Path, elsewhere: Path, case: str, bf16: bool, rounds: int, width: int, layers: int) -> list[str]:
    target = elsewhere if case.endswith("elsewhere") else root
    dtype = torch.bfloat16 if bf16 else torch.float32
    x = torch.randn(256, width, dtype=dtype)
    shared = (case, bf16, width, layers)
    behind = Job(make(root, *shared, {"writer": {"decoupled": True}}), x)
    at_once = Job(make(root, *shared, {}), x)
    memory = Job(make(root, *shared, {"in_memory": {"every": 4, "path": str(elsewhere / "memory")}}), x)
    for job in (behind, at_once):
        for _ in range(3):
            job.step()
        job.engine.save_checkpoint(target, tag="t")
        job.engine._parts.checkpoints.wait()
    for _ in range(4):
        memory.step()
    ratios, memory_ratios, slower, sync = [], [], [], []
    for _ in range(rounds):
        plain = statistics.median(behind.step()[0] for _ in range(3))
        still, more = behind.save(target, plain, 3)
        waited, _ = at_once.save(target, plain, 0)
        usual = statistics.median(memory.step()[0] for _ in range(3))
        copying, own = memory.step()
        following = memory.step()
        memory.engine._parts.checkpoints.wait()
        for _ in range(3):
            memory.step()
        ratios.append(still / waited)
        slower.append(more / waited)
        memory_ratios.append((max(0.0, copying - usual) + own + following[1]) / waited)
        sync.append(waited)
    for job in (behind, at_once, memory):
        job.engine.destroy()
    return [
        f"{'bf16' if bf16 else 'fp32'} {case:<24} waits {statistics.median(sync) * 1e3:7.0f} ms for a save at once;"
        f" behind it stands still {_percent(ratios)} of that, steps take {_percent(slower)} of it longer;"
        f" a copy in memory {_percent(memory_ratios)}"
    ]


def _percent(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):6.1%} ({min(ratios):.1%} to {max(ratios):.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--cases", default="", help="names, separated by commas; default: all")
    arguments = parser.parse_args()
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with tempfile.TemporaryDirectory() as root:
            for case in arguments.cases.split(",") if arguments.cases else CASES:
                for bf16 in (False, True):
                    sizes = (arguments.rounds, arguments.width, arguments.layers)
                    lines = run_ranks(measure, 1, Path(root), elsewhere, case, bf16, *sizes)[0]
                    print("\n".join(lines), flush=True)
    finally:
        shutil.rmtree(elsewhere)


if __name__ == "__main__":
    main()
