"""What a rank holds in memory while everything lives in files: the plan, to the byte; and within an enforced limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _memory_count import counting_new_storages
from _memory_limits import MemoryGroup, find_parent, memory_groups
from torch import nn

import zero_core
from zero_comm import run_ranks

TRAINING = Path(__file__).with_name("_memory_training.py")
STATE_BYTES = 16  # float32: weights, gradients, two moments
BLOCK_ELEMENTS = 1024 * 1025
PAGE = 4096
# What a rank needs besides what it has at rest, both measured with 3 and with 205 blocks: while a block is computed and
# the one before reduced, 26 MiB of whole weights and gradients, six times a block's; and for every block 69 KiB of
# modules, plans and autograd's nodes (12 KiB by malloc, 30 KiB of Python's, the rest between them), 0.4 % of its state.
IN_FLIGHT_BYTES = 32 << 20
OBJECT_BYTES = 80 << 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def measure(drive: str, buffers: int, device: str) -> dict[str, Any]:
    place = {"device": device, **({"nvme_path": drive, "buffer_count": buffers} if device == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "unit_min_numel": 1,
            "sub_group_size": 8192,
            "offload_optimizer": place,
            "offload_param": place,
        },
    }
    found: dict[str, Any] = {"live": [], "reported": [], "held": []}
    with counting_new_storages() as live_bytes:
        engine = zero_core.initialize(model=Net(), config=config)[0]
        for _ in range(3):
            engine.backward(engine(torch.randn(2, 96, dtype=torch.bfloat16)))
            engine.step()
            found["live"].append(live_bytes())
            by_tier = engine.memory_report(by="tier")
            found["reported"].append(sum(nbytes for tier, nbytes in by_tier.items() if tier != "nvme"))
            found["held"].append(engine.offloading.update.memory())
    units = engine.partition.units
    found["plan"] = dict(engine.offloading.update.plan)
    found["shards"] = [unit.layout.shard_numel * unit.plan.dtype.itemsize for unit in units]
    found["placeholders"] = engine.memory_report()["placeholders"]
    found["optimizer"] = 4 * len(engine.sharded_optimizer.fragments)  # the optimizer's parameters stand on nothing
    engine.destroy()
    return found


@pytest.mark.parametrize(("ranks", "buffers"), [(1, 4), (2, 3), (3, 4)])
def test_a_rank_holds_ring_buffers_and_nothing_else_to_the_byte(ranks: int, buffers: int, tmp_path: Path) -> None:
    for rank in run_ranks(measure, ranks, str(tmp_path), buffers, "nvme"):
        plan, largest = rank["plan"], max(rank["shards"])
        in_memory = sum(plan[what] for what in ("states", "ring", "gradients", "staging", "device"))
        expected = in_memory + buffers * -(-largest // PAGE) * PAGE + rank["placeholders"]
        assert rank["held"] == [plan] * 3
        assert rank["live"] == [expected + rank["optimizer"]] * 3
        assert rank["reported"] == [expected] * 3


def test_on_the_host_a_rank_holds_its_shards_states_and_gradients_to_the_byte(tmp_path: Path) -> None:
    for rank in run_ranks(measure, 2, str(tmp_path), 0, "cpu"):
        plan = rank["plan"]
        expected = plan["states"] + plan["gradients"] + sum(rank["shards"]) + rank["placeholders"]
        assert rank["held"] == [plan] * 3
        assert rank["live"] == [expected + rank["optimizer"]] * 3
        assert rank["reported"] == [expected] * 3


def train(
    blocks: int, drive: Path, ranks: int, group: MemoryGroup | None = None, limits: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Three steps of so many blocks on ``ranks`` processes, all in ``group``, or each with its limit of bytes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # freed unit buffers go back to the system
    started = []
    for rank in range(ranks):
        where = "-" if group is None else str(group.path)
        command = [sys.executable, str(TRAINING), "3", str(blocks), where, str(drive)]
        if group is not None:
            command = group.command(*command)
        elif limits:
            command = ["prlimit", f"--data={limits[rank]}", *command]
        environment = {**os.environ, **shared, "RANK": str(rank)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * ranks, said
    return [json.loads(out) for out, _ in said]


def check(limit: int, found: list[dict[str, Any]], drive: Path) -> None:
    for rank in found:
        assert rank["elements"] * STATE_BYTES >= 3 * limit
        assert rank["losses"][-1] < rank["losses"][0]
    assert {path.suffix for path in drive.rglob("*")} <= {".lock"}


@pytest.mark.soak
def test_a_model_of_three_times_the_limit_of_its_control_group_trains_from_files(tmp_path: Path) -> None:
    try:
        find_parent()
    except OSError as error:
        pytest.skip(f"no control group with a memory limit: {error}")
    with memory_groups(1) as groups:
        small = train(3, tmp_path, 2, groups[0])
    limit = max(rank["anonymous"] for rank in small) + (160 << 20)  # the pages of torch's own files want room too
    with memory_groups(1) as groups:
        groups[0].limit(limit)
        check(limit, train(-(-3 * limit // (STATE_BYTES * BLOCK_ELEMENTS)), tmp_path, 2, groups[0]), tmp_path)


@pytest.mark.soak
def test_a_model_of_three_times_its_data_segment_trains_from_files(tmp_path: Path) -> None:
    at_rest = [rank["data"] for rank in train(3, tmp_path, 2)]
    room = sum(at_rest) + 2 * IN_FLIGHT_BYTES
    blocks = -(-3 * room // (STATE_BYTES * BLOCK_ELEMENTS - 3 * 2 * OBJECT_BYTES))
    limits = [data + IN_FLIGHT_BYTES + blocks * OBJECT_BYTES for data in at_rest]
    check(sum(limits), train(blocks, tmp_path, 2, limits=limits), tmp_path)
