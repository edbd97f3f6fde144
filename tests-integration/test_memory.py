"""Bytes of model state that one rank holds: the ZeRO formulas, by counting every live storage of the process.

With Ψ elements of all flat buffers (padding included) on N ranks, Adam, and p, a, m, s the bytes per element of
parameters, accumulated gradients, master (0 where parameters are their own master) and each of two moments:

    stage    parameters    gradients                  master       moments
    0        p Ψ           g Ψ + (a Ψ)                m Ψ          2 s Ψ
    1        p Ψ           g Ψ + (a Ψ/N)              m Ψ/N        2 s Ψ/N
    2        p Ψ           a Ψ/N                      m Ψ/N        2 s Ψ/N
    3        p Ψ/N         a Ψ/N                      m Ψ/N        2 s Ψ/N

g is the dtype in which autograd delivers (= p). Stages 0 and 1 keep that flat buffer from step to step; the accumulated
gradient, in brackets, is a second buffer where a != g and a view of the first where a = g. It lives from the
reduction to the end of the step, like the gradients of stages 2 and 3. In bf16 stage 0 shows ``p.grad`` in the
parameters' dtype: it stands on the same flat buffer.

Moments are counted without padding, because an optimizer sees parameters' fragments only; Adam's step counter adds four
bytes for every fragment. Named extra: one element for every released parameter (its placeholder), the model's buffers.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _memory_count import counting_new_storages
from _memory_limits import find_parent, memory_groups
from torch import nn

import zero_core
from zero_comm import run_ranks

STAGES = (0, 1, 2, 3)
SIZES = {"fp32": {"p": 4, "a": 4, "m": 0, "s": 4}, "bf16": {"p": 2, "a": 4, "m": 4, "s": 4}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUFFER_ELEMENTS = 1000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 95)) for _ in range(3))
        self.joints = nn.ModuleList(nn.Linear(95, 96) for _ in range(3))
        self.register_buffer("offset", torch.zeros(BUFFER_ELEMENTS, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, joint in zip(self.blocks, self.joints, strict=True):
            x = joint(block(x))
        return x.float().square().mean() + self.offset.sum()


def test_the_count_sees_every_storage_once_and_gradients_that_python_never_touched() -> None:
    with counting_new_storages() as live_bytes:
        assert live_bytes() == 0
        kept = [torch.zeros(10), torch.zeros(6, dtype=torch.bfloat16)]
        views = {"a": kept[0][2:], "b": kept[0].view(2, 5)}
        assert live_bytes() == 40 + 12
        weight = nn.Parameter(torch.zeros(100))
        (weight * 1.5).sum().backward()
        assert live_bytes() == 40 + 12 + 400 + 400
        del kept, weight
        assert live_bytes() == 40
        views.clear()
        assert live_bytes() == 0


def measure(stage: int, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 0,  # a line of progress keeps the loss until the step
    }
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    found: dict[str, Any] = {"after": [], "before": [], "reported after": [], "reported before": []}
    with counting_new_storages() as live_bytes:
        engine = zero_core.initialize(model=Net(), optimizer=adamw, config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 96, dtype=DTYPES[dtype])))
            found["before"].append(live_bytes())
            found["reported before"].append(sum(engine.memory_report().values()))
            engine.step()
            found["after"].append(live_bytes())
            found["reported after"].append(sum(engine.memory_report().values()))
    layout, ranks = engine.partition.layout, engine.partition.owned_ranks()
    owned = [fragment.length for unit in layout.units for rank in ranks for fragment in unit.fragments(rank)]
    found["facts"] = {
        "psi": layout.numel,
        "used": layout.used_numel,
        "owned": sum(owned),
        "updated": len(owned) if stage else sum(len(unit.entries) for unit in layout.units),
        "parameters": sum(len(unit.entries) for unit in layout.units),
    }
    engine.destroy()
    return found


def measure_all(dtype: str) -> dict[int, dict[str, Any]]:
    return {stage: measure(stage, dtype) for stage in STAGES}


@functools.cache
def measured(world_size: int, dtype: str) -> list[dict[int, dict[str, Any]]]:
    return run_ranks(measure_all, world_size, dtype)


def formula(stage: int, world_size: int, dtype: str, facts: dict[str, int], *, with_gradients: bool) -> int:
    """Bytes on this rank before the step (``with_gradients``) or after it."""
    size, psi, n = SIZES[dtype], facts["psi"], world_size
    parameters = size["p"] * psi // (n if stage >= 3 else 1)
    accumulated = size["a"] * psi // (n if stage >= 1 else 1) if with_gradients else 0
    if stage <= 1:
        accumulated = size["p"] * psi + (accumulated if size["a"] != size["p"] else 0)
    master = size["m"] * psi // (n if stage >= 1 else 1)
    moments = 2 * size["s"] * facts["owned"] + 4 * facts["updated"]
    placeholders = size["p"] * (facts["parameters"] if stage == 3 else stage > 0) if n > 1 else 0
    return parameters + accumulated + master + moments + placeholders


MEASURED = [
    *(("fp32", 1), ("fp32", 2), ("bf16", 4)),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (("fp32", 4), ("bf16", 1), ("bf16", 2))),
]
"""Dtypes and world sizes: the formula has a factor for each, so every one of either comes once by default."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "world_size"), MEASURED)
def test_live_storages_are_those_of_the_formula_and_of_the_report(dtype: str, world_size: int, stage: int) -> None:
    for answers in measured(world_size, dtype):
        found = answers[stage]
        facts = found["facts"]
        assert facts["used"] <= facts["psi"] <= 1.01 * facts["used"] + 6 * 64 * world_size
        before = formula(stage, world_size, dtype, facts, with_gradients=True)
        after = formula(stage, world_size, dtype, facts, with_gradients=False)
        buffers = 8 * BUFFER_ELEMENTS
        assert [n - buffers for n in found["after"]] == [after] * 2
        assert found["reported after"] == [after] * 2
        no_moments_yet = 2 * SIZES[dtype]["s"] * facts["owned"] + 4 * facts["updated"]
        assert [n - buffers for n in found["before"]] == [before - no_moments_yet, before]
        assert found["reported before"] == [before - no_moments_yet, before]


@pytest.mark.parametrize(("dtype", "world_size"), MEASURED)
def test_all_ranks_together_hold_each_moment_once_from_stage_1_on(dtype: str, world_size: int) -> None:
    for stage in STAGES:
        facts = [answers[stage]["facts"] for answers in measured(world_size, dtype)]
        copies = world_size if stage == 0 else 1
        assert sum(f["owned"] for f in facts) == copies * facts[0]["used"]


# ---------------------------------------------------------------------------------------------------------------------
# The same, held by the kernel: every rank in a control group of its own

TRAINING = Path(__file__).resolve().parent / "_memory_training.py"
BLOCK_ELEMENTS = 1024 * 1024 + 1024
STATE_BYTES = 16  # of model state per element in fp32: parameter, gradient, two moments


@dataclass(frozen=True)
class Ended:
    """How one rank ended, and what it said."""

    status: int
    facts: dict[str, Any]
    errors: str


def train_in_groups(
    stage: int, blocks: int, limit: int | None, *more: str, ranks_count: int = 4, together: bool = False
) -> list[Ended]:
    """Train on ranks, each in a control group of its own, or ``together`` in one, limited to ``limit`` bytes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks_count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # freed unit buffers go back to the system
    with memory_groups(1 if together else ranks_count) as groups:
        if limit is not None:
            for group in groups:
                group.limit(limit)
        ranks = []
        for rank in range(ranks_count):
            group = groups[0 if together else rank]
            command = group.command(sys.executable, str(TRAINING), str(stage), str(blocks), str(group.path), *more)
            environment = {**os.environ, **shared, "RANK": str(rank)}
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        try:
            said = [rank.communicate(timeout=200) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [Ended(r.returncode, json.loads(out or "{}"), err) for r, (out, err) in zip(ranks, said, strict=True)]


def test_stage_3_trains_where_the_whole_model_state_would_exceed_each_ranks_memory_limit() -> None:
    try:
        find_parent()
    except OSError as error:
        pytest.skip(f"no control group with a memory limit: {error}")
    (small,) = train_in_groups(3, 1, None, ranks_count=1)
    assert small.status == 0, small
    baseline = small.facts["anonymous"]  # torch, the engine, its process groups, one block
    blocks = round(2.6 * baseline / (STATE_BYTES * BLOCK_ELEMENTS))
    whole = STATE_BYTES * BLOCK_ELEMENTS * blocks
    limit = baseline + int(0.55 * whole)
    assert limit < whole  # the unsharded model state alone, without the interpreter and torch, would not fit

    sharded = train_in_groups(3, blocks, limit, ranks_count=3)
    assert [rank.status for rank in sharded] == [0] * 3, sharded
    assert all(rank.facts["elements"] * STATE_BYTES == whole for rank in sharded)
    assert all(rank.facts["losses"][1] < rank.facts["losses"][0] for rank in sharded)

    replicated = train_in_groups(0, blocks, limit, ranks_count=1)  # at stage 0 one rank holds what each of three would
    assert [rank.status for rank in replicated] == [-signal.SIGKILL], replicated


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "together"), [(4, False), (2, True)], ids=["a limit each", "one limit"])
def test_a_model_of_three_times_the_limit_is_built_and_trained_from_files(
    tmp_path: Path, ranks: int, together: bool
) -> None:
    try:
        find_parent()
    except OSError as error:
        pytest.skip(f"no control group with a memory limit: {error}")
    small = train_in_groups(3, 3, None, str(tmp_path), ranks_count=ranks, together=together)
    assert [rank.status for rank in small] == [0] * ranks, small
    baseline = max(rank.facts["anonymous"] for rank in small)  # torch, the engine, the ring buffers, a few blocks
    limit = baseline + (160 << 20) * (ranks if together else 1)  # the pages of torch's own files want room too
    blocks = -(-3 * limit // (STATE_BYTES * BLOCK_ELEMENTS))
    trained = train_in_groups(3, blocks, limit, str(tmp_path), ranks_count=ranks, together=together)
    assert [rank.status for rank in trained] == [0] * ranks, trained
    for rank in trained:
        assert rank.facts["elements"] * STATE_BYTES >= 3 * limit
        assert rank.facts["losses"][1] < rank.facts["losses"][0]
    assert {path.suffix for path in tmp_path.rglob("*")} <= {".lock"}


@pytest.mark.soak
def test_a_layer_larger_than_the_limit_trains_in_tiles_and_not_as_one(tmp_path: Path) -> None:
    try:
        find_parent()
    except OSError as error:
        pytest.skip(f"no control group with a memory limit: {error}")
    (small,) = train_in_groups(3, 3, None, str(tmp_path), "tiled", ranks_count=1)
    assert small.status == 0, small
    limit = small.facts["anonymous"] + (160 << 20)  # the pages of torch's own files want room too
    tiles = limit // (4 * BLOCK_ELEMENTS) + 1
    (tiled,) = train_in_groups(3, tiles, limit, str(tmp_path), "tiled", ranks_count=1)
    assert tiled.status == 0, tiled
    assert 4 * tiled.facts["elements"] > limit  # the layer's fp32 weights alone
    assert tiled.facts["losses"][1] < tiled.facts["losses"][0]
    (whole,) = train_in_groups(3, tiles, limit, str(tmp_path), "wide", ranks_count=1)
    assert whole.status == -signal.SIGKILL, whole
