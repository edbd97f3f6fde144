"""The verdict of a run's record names what was made slow: a rank, its data, its drive."""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import pytest
import torch
from engine_cases import RANKS, WIDE, batch, build, recorded, start, train
from torch import nn

from zero_comm import run_ranks
from zero_report import read_run
from zero_report.analysis.analyse import analyse


class _Waits(nn.Module):
    """Computes for a while, in forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = build()
        self.seconds = seconds

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.net(x, y)


def _train_slowly(path: str, slow: int, where: str, stage: int) -> None:
    rank = torch.distributed.get_rank()
    model = _Waits(0.0)
    engine = start(stage, model, **recorded(Path(path)))
    usual = []
    for number in range(3):
        began = time.perf_counter()
        engine.backward(engine(*batch(number)))
        engine.step()
        usual.append(time.perf_counter() - began)
    seconds = max(0.05, 2 * max(usual)) if rank == slow else 0.0
    model.seconds = seconds if where == "compute" else 0.0
    for number in range(12):
        if where == "data":
            time.sleep(seconds)
        engine.backward(engine(*batch(number)))
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(("stage", "slow"), [(2, 0), (3, 1)])
def test_a_slow_rank_is_named(tmp_path: Path, stage: int, slow: int) -> None:
    run_ranks(_train_slowly, RANKS, str(tmp_path), slow, "compute", stage)
    sentence = analyse(read_run(tmp_path)).verdict.sentence
    assert sentence.startswith(f"Rank {slow} is slower than rank {1 - slow}"), sentence


@pytest.mark.parametrize(("stage", "slow"), [(2, 1), (3, 0)])
def test_a_slow_data_loader_is_named(tmp_path: Path, stage: int, slow: int) -> None:
    run_ranks(_train_slowly, RANKS, str(tmp_path), slow, "data", stage)
    sentence = analyse(read_run(tmp_path)).verdict.sentence
    assert sentence.startswith(f"Rank {slow} waits for its data"), sentence


SLOW_DISK = 20_000_000  # bytes per second
BLKIO = Path("/sys/fs/cgroup/blkio")


def _train_from_a_slow_disk(path: str, slow: int) -> None:
    """Stage 3 in files; the reads of rank ``slow`` are held to `SLOW_DISK` from the third step on."""
    device = os.stat(path).st_dev
    group = BLKIO / f"zero-{os.getpid()}"
    offload = {"device": "nvme", "nvme_path": path}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": offload, "offload_optimizer": offload}
    engine = start(3, build(blocks=6, width=WIDE), **recorded(Path(path) / "record", zero_optimization=zero))
    train(engine, 0, 2)
    if torch.distributed.get_rank() == slow:
        group.mkdir()
        (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {SLOW_DISK}")
        for task in os.listdir("/proc/self/task"):
            (group / "tasks").write_text(task)
    train(engine, 2, 12)
    if group.exists():
        for task in os.listdir("/proc/self/task"):
            (BLKIO / "tasks").write_text(task)
        group.rmdir()
    engine.destroy()


@pytest.mark.soak
@pytest.mark.skipif(
    os.geteuid() != 0 or not (BLKIO / "tasks").exists(),
    reason="slowing a drive down needs root and the blkio controller",
)
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_disk_is_named(slow: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as path:  # on a drive; /tmp may be memory
        run_ranks(_train_from_a_slow_disk, RANKS, path, slow)
        sentence = analyse(read_run(Path(path) / "record")).verdict.sentence
    print(sentence)
    assert sentence.startswith(f"Rank {slow} waits for "), sentence
    assert re.search(rf"\(drive {re.escape(path)}/?\w*, \w+ \w+\)", sentence), sentence
