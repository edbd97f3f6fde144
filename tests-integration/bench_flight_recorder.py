"""Measure what the flight recorder costs a training step: stage 3 on two ranks, with and without, in the same
processes.

    python tests-integration/bench_flight_recorder.py [--rounds 150] [--layers 8] [--width 128]

Steps with and without the recorder alternate in an order that changes; the ratio is taken within each pair. A small
model on a fast transport is the worst case: many collectives, little to compute. Beside the ratio stands the direct
count: entries per step times the time of one entry, over the time of a step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WANTED = 0.01


def engine(layers: int, width: int) -> Any:
    import zero_core

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "unit_min_numel": 1},
    }
    return zero_core.initialize(model=nn.Sequential(*blocks), config=config)[0]


def rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    trained = engine(args.layers, args.width)
    groups = trained.partition.groups
    tracks = [channel._track for channel in (groups.gather, groups.reduce, groups.control)]
    recorder = tracks[0]._recorder
    batch = torch.randn(8, args.width)

    def step(with_recorder: bool) -> float:
        for track in tracks:
            track._recorder = recorder if with_recorder else None
        begin = time.perf_counter()
        loss = trained(batch).pow(2).mean()
        trained.backward(loss)
        trained.step()
        return time.perf_counter() - begin

    for _ in range(5):
        step(True)
    order = random.Random(1)  # the same on every rank
    pairs = []
    before = recorder._count
    for _ in range(args.rounds):
        first = order.random() < 0.5
        seconds = {first: step(first), not first: step(not first)}
        pairs.append((seconds[True], seconds[False]))
    entries = (recorder._count - before) / args.rounds
    for track in tracks:
        track._recorder = recorder
    if int(os.environ["RANK"]) == 0:
        report(pairs, entries, tracks[0])
    trained.destroy()


def report(pairs: list[tuple[float, float]], entries: float, track: Any) -> None:
    from zero_comm import Tag

    tag = Tag("gather", "layers.11.attention.weight", 3)
    begin = time.perf_counter()
    for _ in range(20_000):
        with track.start(tag, 4096):
            pass
    entry = (time.perf_counter() - begin) / 20_000
    ratios = [with_recorder / without for with_recorder, without in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain = statistics.median(without for _, without in pairs)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
    print(f"step without the recorder: {plain * 1e3:.2f} ms; {entries:.0f} collectives per step")
    print(f"with / without: {middle:.4f} ± {error:.4f}  (quartiles {low:.3f} … {high:.3f}), wanted: {1 + WANTED}")
    print(f"one entry: {entry * 1e6:.2f} µs, so {entries * entry / plain:.2%} of the step, wanted: {WANTED:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    from zero_launch import LaunchSpec, launch

    launch(LaunchSpec(str(Path(__file__).resolve()), args=tuple(sys.argv[1:]), nproc=2, quiet=True))


if __name__ == "__main__":
    main()
