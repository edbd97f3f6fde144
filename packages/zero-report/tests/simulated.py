"""Records of runs that never were, made by the writer with a clock of their own: what each test needs to be slow is."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_report import RecordWriter, SpanKind

UNIT_BYTES = 50 << 20
CONFIGURATION = [
    ["train_batch_size", 64, "user", ""],
    ["zero_optimization.stage", 3, "user", ""],
    ["zero_optimization.overlap_comm", True, "user", "accepted, no effect: communication always overlaps"],
    ["zero_optimization.offload_param.nvme_path", "/mnt/nvme", "user", ""],
    ["zero_optimization.offload_optimizer.nvme_path", None, "default", ""],
    ["optimizer.params.lr", 0.0003, "user", ""],
    ["gradient_accumulation_steps", 1, "derived", ""],
    ["gradient_clipping", 1.0, "default", ""],
]


@dataclass
class Simulation:
    """What the ranks of a run are like. Seconds; ``data``, ``compute`` and ``disk`` by rank, where it is special.

    ``disk``: seconds in which a unit's shard comes from its file, instead of 0 for memory.
    """

    ranks: int = 2
    steps: int = 40
    units: int = 6
    unit_s: float = 0.010
    data: Mapping[int, float] = field(default_factory=dict)
    compute: Mapping[int, float] = field(default_factory=dict)
    disk: Mapping[int, float] = field(default_factory=dict)
    names: str = "layers.{}"
    configuration: list[list[Any]] = field(default_factory=lambda: CONFIGURATION)
    facts: dict[str, Any] = field(default_factory=dict)
    spans: bool = True
    close: bool = True
    attempt: int = 0
    first_step: int = 1
    seed: int = 0
    memory_scale: float = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def simulate(path: Path, what: Simulation) -> None:
    """Write the record of ``what``; ranks meet at every gather and reduction."""
    clocks = [Clock() for _ in range(what.ranks)]
    facts = {
        "title": "simulated run",
        "configuration": what.configuration,
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "machine": {"host": "node0", "device": "cpu", "cores": 8},
        **what.facts,
    }
    writers = [
        RecordWriter(
            path,
            rank=rank,
            world_size=what.ranks,
            attempt=what.attempt,
            facts=facts if rank == 0 else {},
            first_step=what.first_step,
            clock=clocks[rank],
            background=False,
        )
        for rank in range(what.ranks)
    ]
    for writer in writers:  # all clocks show the same
        writer._unix = 1_700_000_000.0 + 1000 * what.attempt
    chance = random.Random(what.seed)
    for step in range(what.first_step, what.first_step + what.steps):
        _step(what, step, clocks, writers, chance)
        if step % 64 == 0:
            for writer in writers:
                writer.flush()
    if what.close:
        for writer in writers:
            writer.close()
    else:
        for writer in writers:
            writer.flush()


def _step(what: Simulation, step: int, clocks: list[Clock], writers: list[RecordWriter], chance: random.Random) -> None:
    for rank, (clock, writer) in enumerate(zip(clocks, writers, strict=True)):
        begin = clock.now
        clock.now += what.data.get(rank, 0.0005) * chance.uniform(0.9, 1.1)
        writer.span(SpanKind.DATA, "data", begin, clock.now)
    begins = [clock.now for clock in clocks]
    order = range(what.units)
    for unit in order:
        _unit(what, unit, SpanKind.GATHER, 1.0, clocks, writers, chance)
    for rank, writer in enumerate(writers):
        writer.span(SpanKind.FORWARD, "forward", begins[rank], clocks[rank].now)
        begins[rank] = clocks[rank].now
    for unit in reversed(order):
        _unit(what, unit, SpanKind.REDUCE, 2.0, clocks, writers, chance)
    for rank, (clock, writer) in enumerate(zip(clocks, writers, strict=True)):
        writer.span(SpanKind.BACKWARD, "backward", begins[rank], clock.now)
        begin = clock.now
        clock.now += 0.2 * what.unit_s * what.units * what.compute.get(rank, 1.0)
        writer.span(SpanKind.UPDATE, "step", begin, clock.now)
        writer.count("collectives", 2 * what.units)
        decay = 2.2 + 2.5 * math.exp(-step / 60) + chance.gauss(0, 0.03)
        writer.end_step(
            loss=decay,
            loss_min=decay,
            loss_max=decay,
            lr=3e-4 * min(1.0, step / 20),
            grad_norm=1.0 + chance.random() / 5,
            samples=64,
            tokens=64 * 1024,
            skipped=0,
        )


def _unit(
    what: Simulation,
    unit: int,
    kind: SpanKind,
    work: float,
    clocks: list[Clock],
    writers: list[RecordWriter],
    chance: random.Random,
) -> None:
    """Each rank fetches its shard, all meet, each computes."""
    name = what.names.replace("{}", str(unit), 1)
    starts = []
    for rank, (clock, writer) in enumerate(zip(clocks, writers, strict=True)):
        read = what.disk.get(rank, 0.0)
        if read:
            begin = clock.now
            clock.now += read * chance.uniform(0.9, 1.1)
            if what.spans:
                writer.span(
                    SpanKind.TIER_READ, f"drive, shards in: {name}", begin, clock.now, clock.now - begin, UNIT_BYTES
                )
        starts.append(clock.now)
    met = max(starts) + 0.0002
    for rank, (clock, writer) in enumerate(zip(clocks, writers, strict=True)):
        if what.spans and what.ranks > 1:
            writer.span(kind, name, starts[rank], met, met - starts[rank], UNIT_BYTES)
            writer.count("sent_bytes", UNIT_BYTES)
        clock.now = met
        begin = clock.now
        clock.now += work * what.unit_s * what.compute.get(rank, 1.0) * chance.uniform(0.98, 1.02)
        if what.spans and kind == SpanKind.GATHER:
            writer.span(SpanKind.COMPUTE, name, begin, clock.now)
        gathered = round(UNIT_BYTES * (2 + math.sin(unit)) * what.memory_scale)
        writer.memory(
            {
                "gathered": gathered,
                "parameters": 300 << 20,
                "masters": 600 << 20,
                "gradients": (unit + 1) * (20 << 20) if kind == SpanKind.REDUCE else 0,
                "states": 1200 << 20,
                "activations": (unit + 1) * (30 << 20),
                "other": 100 << 20,
            },
            process=3 << 30,
        )
