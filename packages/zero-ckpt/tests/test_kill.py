"""Whoever is killed whenever: the last good checkpoint loads, nobody hangs, and what was left is swept."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from jobs_that_save import Job, check

SIZES = (1 << 20, 1 << 20, 16 << 20)  # the last goes past the page cache where the nvme extra is installed


def kill_once(folder: Path, world_size: int, nbytes: int, victims: str, how: str, rng: random.Random) -> None:
    job = Job(folder / "run", folder / "store", folder / "notes", world_size, nbytes, how)
    try:
        job.wait_for_first()
        time.sleep(rng.random() * 0.15)
        if victims == "all":
            os.killpg(job.process.pid, signal.SIGKILL)
        else:
            os.kill(rng.choice(job.ranks()), signal.SIGKILL)
        job.wait()  # a survivor of one dead rank gives up on its own
    finally:
        job.kill()
    check(folder / "run", nbytes, job.saved())


@pytest.mark.parametrize("victims", ["all", "one"])
def test_killed_at_random_points_the_last_good_checkpoint_loads(tmp_path: Path, victims: str) -> None:
    rng = random.Random(7)
    for attempt in range(10):
        how = "behind" if attempt % 5 > 2 else "now"
        kill_once(tmp_path / str(attempt), 2 if attempt % 2 else 3, SIZES[attempt % 3], victims, how, rng)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["now", "behind"])
@pytest.mark.parametrize("victims", ["all", "one"])
def test_killed_at_two_hundred_random_points(tmp_path: Path, victims: str, how: str) -> None:
    rng = random.Random()
    for attempt in range(100):
        kill_once(tmp_path / str(attempt), 1 + attempt % 4, SIZES[attempt % 3], victims, how, rng)
    print(f"100 kills of {victims}, saves {how}: 0 saves lost, 0 wrong")
