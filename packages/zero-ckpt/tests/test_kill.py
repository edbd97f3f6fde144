"""Whoever is killed whenever: the last good checkpoint loads, nobody hangs, and what was left is swept."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_worker import content

from zero_ckpt import Interval, open_checkpoint, save_sharded, verify

WORKER = Path(__file__).with_name("kill_worker.py")
SIZES = (1 << 20, 1 << 20, 16 << 20)  # the last goes past the page cache where the nvme extra is installed


def kill_once(root: Path, world_size: int, nbytes: int, victims: str, rng: random.Random) -> None:
    root.mkdir(parents=True)
    command = [sys.executable, str(WORKER), str(root), str(world_size), str(nbytes)]
    job = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while not (root / "ready").exists():
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.002)
        time.sleep(rng.random() * 0.15)
        if victims == "all":
            os.killpg(job.pid, signal.SIGKILL)
        else:
            os.kill(int(rng.choice((root / "pids").read_text().split())), signal.SIGKILL)
        job.wait(10)  # a survivor of one dead rank gives up on its own
        while _alive(root):
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        if _alive(root):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    checkpoint = open_checkpoint(root)
    assert checkpoint.read("w", "param") == checkpoint.read("linked", "exp_avg") == content(checkpoint.step, nbytes)
    assert verify(checkpoint.path).ok
    assert checkpoint.client_state["step"] == checkpoint.step
    save_sharded(root, "after", [Interval("w", "param", (1,), "U8", 0, b"!")], step=99_999)
    assert open_checkpoint(root).tag == "after"
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


def _alive(root: Path) -> list[str]:
    pids = (root / "pids").read_text().split() if (root / "pids").exists() else []
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def _state(pid: str) -> str:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize("victims", ["all", "one"])
def test_killed_at_random_points_the_last_good_checkpoint_loads(tmp_path: Path, victims: str) -> None:
    rng = random.Random(7)
    for attempt in range(10):
        kill_once(tmp_path / str(attempt), 2 if attempt % 2 else 3, SIZES[attempt % 3], victims, rng)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victims", ["all", "one"])
def test_killed_at_two_hundred_random_points(tmp_path: Path, victims: str) -> None:
    rng = random.Random()
    for attempt in range(100):
        kill_once(tmp_path / str(attempt), 1 + attempt % 4, SIZES[attempt % 3], victims, rng)
