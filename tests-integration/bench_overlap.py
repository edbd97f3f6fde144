"""How much of the host's update ``"overlap": "exact"`` hides beside a device that leaves the host's cores alone.

    python tests-integration/bench_overlap.py [--rounds 5] [--steps 5] [--layers N] [--width N] [--stage 2]

One rank with all cores. Modules sleep in place of computing: all of backward as long as the update takes, forward half
of that. ``off`` and ``exact`` take a few steps per round in turn, until the last one's update is done. ``hidden`` is
what ``exact`` saves of a step, as a share of the update's length, with that last update counted in full. ``replayed``:
every step clips, so nothing that was begun in backward can be taken.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

WARM_UP = 6
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""torch's idle threads sleep. By default they spin on cores that a device would leave alone."""


class Sleep(torch.autograd.Function):
    """Stands for a layer on a device: takes time, and no cores; the gradient is the weight's kept one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.layer.backward_s)
        return grads[0], ctx.layer.gradient.detach(), None  # an alias, which autograd takes without a copy


class Layer(nn.Module):
    def __init__(self, numel: int, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.gradient = gradient
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Sleep.apply(x, self.weight, self)
        return out


def make(args: argparse.Namespace, overlap: str, clip: float) -> Any:
    import zero_core

    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    gradient = torch.randn(args.width, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = nn.Sequential(*(Layer(args.width, gradient) for _ in range(args.layers)))
    zero: dict[str, Any] = {
        "stage": args.stage,
        "unit_max_numel": args.width,
        "unit_min_numel": 1,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu", "overlap": overlap, "pin_memory": False},
    }
    if args.stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "bf16": {"enabled": args.dtype == "bf16"},
    }
    return zero_core.initialize(model=model, config=settings)[0]


def one_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, requires_grad=True)).sum())
    engine.step()


def update_length(engine: Any, rounds: int) -> float:
    """The median seconds of the update alone, of an engine that does not overlap."""
    found = []
    for _ in range(rounds):
        engine.backward(engine(torch.ones(1, requires_grad=True)).sum())
        begin = time.perf_counter()
        engine.offloading.update.step()
        found.append(time.perf_counter() - begin)
        engine.zero_grad()
    return statistics.median(found)


def compare(args: argparse.Namespace, clip: float) -> tuple[list[float], list[float], float, Any]:
    """The seconds of steps without and with overlap, in turn, the update's length, and the counts."""
    engines = [make(args, overlap, clip) for overlap in ("off", "exact")]
    for engine in engines:
        for _ in range(WARM_UP):
            one_step(engine)
    length = update_length(engines[0], 5)
    for engine in engines:
        for layer in engine.module:
            layer.backward_s, layer.forward_s = length / args.layers, length / args.layers / 2
        one_step(engine)
    seconds: list[list[float]] = [[], []]
    for turn in range(args.rounds):
        for place in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            for _ in range(args.steps):
                one_step(engines[place])
            engines[place].offloading.update.finish()
            seconds[place].append((time.perf_counter() - begin) / args.steps)
    rate = engines[1].offloading.update.rate
    for engine in engines:
        engine.destroy()
    return seconds[0], seconds[1], length, rate


def spread(values: list[float], unit: float) -> str:
    low, middle, high = (f"{value * unit:.2f}" for value in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{middle} ({low} - {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each in a round")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1 << 21, help="parameters of a layer")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    if not PASSIVE.items() <= os.environ.items():  # read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PASSIVE})
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(os.environ.get("ZERO_BENCH_THREADS", os.cpu_count() or 1)))
    print(f"stage {args.stage}, {args.dtype}, {args.layers} layers of {args.width}, {torch.get_num_threads()} threads")
    for name, clip in (("taken", 0.0), ("replayed", 1e-3)):
        off, exact, length, rate = compare(args, clip)
        hidden = [(a - b) / length for a, b in zip(off, exact, strict=True)]
        ratios = [b / a for a, b in zip(off, exact, strict=True)]
        print(f"{name:<10} update {length * 1e3:.0f} ms; off {spread(off, 1e3)} ms; exact {spread(exact, 1e3)} ms")
        print(f"{'':<10} hidden {spread(hidden, 1)}, exact / off {spread(ratios, 1)}")
        print(f"{'':<10} {rate.text()}")


if __name__ == "__main__":
    sys.exit(main())
