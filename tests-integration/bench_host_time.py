"""What the host does in a step: processor time of a tiny model's steps, on this checkout beside another.

    python tests-integration/bench_host_time.py --against /path/to/another/checkout [--ranks 1 2] [--stages 0 1 2 3]

Each checkout trains the same model, of three small parameters in each of ``--layers`` layers, in processes of its own,
one thread each. They take turns of a few steps, and a ratio is taken of each pair of turns: printed are the median and
the quartiles of the ratios, and the least times, in microseconds of rank 0's processor time per step (forward, backward
and step). Without ``--against`` this checkout is measured beside itself, which shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
WARM_UP = 8


class Job:
    """The ranks of one checkout, which take steps when they are told to."""

    def __init__(self, checkout: Path, stage: int, ranks: int, layers: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        sources = os.pathsep.join(str(path) for path in sorted(checkout.glob("packages/*/src")))
        common = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(HERE), "--worker", "--layers", str(layers), "--stages", str(stage)]
        self._ranks = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def take(self, steps: int) -> float:
        """Take so many steps; return rank 0's processor time of one, in seconds."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        return float(json.loads(answers[0])) / steps

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(60)


def work(stage: int, layers: int) -> None:
    """One rank: for each line of a number, take so many steps and say what processor time they took."""
    import torch
    from torch import nn

    import zero_core

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x) * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 0,
    }
    engine = zero_core.initialize(model=model, config=config)[0]
    x = torch.randn(2, 4)
    for line in sys.stdin:
        before = time.process_time()
        for _ in range(int(line)):
            engine.backward(engine(x).square().mean())
            engine.step()
        print(json.dumps(time.process_time() - before), flush=True)
    engine.destroy()


def compare(ours: Path, theirs: Path, stage: int, ranks: int, args: argparse.Namespace) -> str:
    jobs = [Job(ours, stage, ranks, args.layers), Job(theirs, stage, ranks, args.layers)]
    times: list[list[float]] = [[], []]
    for number in range(args.rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            took = jobs[which].take(args.steps if number else WARM_UP)
            if number:
                times[which].append(took)
    for job in jobs:
        job.close()
    low, median, high = statistics.quantiles((a / b for a, b in zip(*times, strict=True)), n=4)
    here, there = map(min, times)
    return (
        f"stage {stage}, {ranks} ranks: {median:5.3f} [{low:5.3f}, {high:5.3f}]  least "
        f"{here * 1e6:7.0f} - {there * 1e6:7.0f} = {(here - there) * 1e6:+6.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, default=HERE.parents[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2, help="in one turn")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.stages[0], args.layers)
        return
    for ranks in args.ranks:
        for stage in args.stages:
            print(compare(HERE.parents[1], args.against.resolve(), stage, ranks, args), flush=True)


if __name__ == "__main__":
    main()
