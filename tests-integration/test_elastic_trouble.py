"""Elastic jobs of the real engine in trouble: signals at any moment, a full disk, two jobs in one folder, a launcher
that is stopped or killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch_hosts import wait_until
from test_elastic import TRAINING, signal_all, that_count, told, undisturbed

from zero_ckpt import open_checkpoint

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
LOCAL = ["--hostfile", "hosts", "--launcher", "local"]
ROUNDS = int(os.environ.get("ZERO_ELASTIC_SIGNALS", "12"))
STARTED_SECONDS = 12.0
"""Ranks train by then, also on a busy machine; signals come before and after."""


def start(folder: Path, *words: object, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zero_launch", *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **variables}
    with (folder / "errors").open("a") as told_of:
        return subprocess.Popen(command, cwd=folder, env=env, stderr=told_of, text=True)


def errors(folder: Path) -> str:
    return (folder / "errors").read_text()


def belongings(folder: Path) -> list[psutil.Process]:
    """The processes whose files for a while are in ``folder``: those of the jobs that `start` began."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    for process in belongings(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def steps(folder: Path) -> int:
    """The last step that was told of; 0 before the first."""
    try:
        return told(folder)[-1].step
    except (FileNotFoundError, IndexError, ValueError):  # nothing yet, or half a line
        return 0


def saved_step(root: Path) -> int:
    """The step of the newest checkpoint, every byte of which is read; 0 where there is none."""
    if not (root / "latest").exists():
        return 0
    found = open_checkpoint(root)
    for key in found.tensors:
        found.read(*key)
    return int(found.step)


@pytest.mark.parametrize("words", [["--nproc", 2], [*LOCAL, "--elastic", "1:2"]], ids=["one machine", "two hosts"])
def test_a_signal_at_any_moment_loses_no_step_that_was_saved(tmp_path: Path, words: list[Any]) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder, chance, before = tmp_path / "checkpoints", random.Random(5), 0
    for number in range(ROUNDS):
        job = start(tmp_path, "--requeue", *words, TRAINING, 100_000, folder, "{}", ELASTIC_EVERY="1")
        seconds = chance.uniform(0.1, STARTED_SECONDS) if number % 2 else 0.0
        if not seconds:  # among steps of which each is saved
            reached = steps(folder)
            assert wait_until(lambda reached=reached: steps(folder) >= reached + 2, 120), errors(tmp_path)
        time.sleep(seconds or chance.uniform(0.0, 0.3))
        signum = chance.choice([signal.SIGUSR1, signal.SIGTERM])
        if signum == signal.SIGUSR1 and chance.random() < 0.5:
            signal_all(job, signum)
        else:
            job.send_signal(signum)
        status = job.wait(timeout=120)
        saved = saved_step(folder)
        print(f"{signal.Signals(signum).name} after {seconds:.1f} s: status {status}, step {saved} is saved")
        assert status == 75, errors(tmp_path)
        assert saved >= max(before, steps(folder)) and "Traceback" not in errors(tmp_path), errors(tmp_path)
        assert wait_until(lambda: not belongings(tmp_path), 15), belongings(tmp_path)
        before = saved
    found = that_count(told(folder))
    left = sorted(set(range(1, max(found) + 1)) - found.keys())  # a rank leaves inside `step`, before that is told
    print(f"{max(found)} steps, not told of: {left}")
    assert len(left) <= ROUNDS


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_disk_that_fills_up_ends_the_job_with_its_reason_and_the_last_checkpoint_is_whole(
    tmp_path: Path, decoupled: bool
) -> None:
    small = tmp_path / "checkpoints"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
        changes = '{"checkpoint": {"writer": {"decoupled": true}}}' if decoupled else "{}"
        job = start(tmp_path, *LOCAL, "--elastic", "1:2", "--restarts", 9, TRAINING, 1000, small, changes)
        status = job.wait(timeout=300)
        err = errors(tmp_path)
        assert status == 1, err
        assert "No space left on device" in err, err
        saved = saved_step(small)
        print(f"step {saved} is saved")
        assert saved >= 3
        assert wait_until(lambda: not belongings(tmp_path), 15)
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        done = start(tmp_path, *LOCAL, "--elastic", "1:2", TRAINING, saved + 4, small, changes)
        assert done.wait(timeout=120) == 0, errors(tmp_path)
        assert that_count(told(small)).keys() >= set(range(1, saved + 5))
    finally:
        for process in belongings(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_two_jobs_in_one_folder_each_end_well_and_leave_whole_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder = tmp_path / "checkpoints"
    changes = '{"checkpoint": {"keep_last": 2}}'
    words = [*LOCAL, "--elastic", "1:2", "--restarts", 3, TRAINING, 40, folder, changes]
    jobs = [start(tmp_path, *words, ELASTIC_EVERY="2") for _ in range(2)]
    assert wait_until(lambda: steps(folder) >= 10, 120), errors(tmp_path)
    ranks = [p for p in belongings(tmp_path) if "zero_launch.rank" in p.cmdline() and p.environ().get("RANK") == "1"]
    random.Random(3).choice(ranks).kill()
    for job in jobs:
        assert job.wait(timeout=300) == 0, errors(tmp_path)
    assert saved_step(folder) == 40
    whole = [entry for entry in folder.iterdir() if entry.name.startswith("global_step")]
    print(sorted(entry.name for entry in folder.iterdir()))
    for entry in whole:
        found = open_checkpoint(folder, entry.name)
        for key in found.tensors:
            found.read(*key)


@pytest.mark.parametrize("words", [["--nproc", 2], LOCAL], ids=["one machine", "two hosts"])
def test_a_launcher_that_was_stopped_goes_on_with_the_losses_of_an_undisturbed_job(
    tmp_path: Path, words: list[Any]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder = tmp_path / "checkpoints"
    words = [*words, "--elastic", "2:2", "--restarts", 5]
    job = start(tmp_path, *words, TRAINING, 90, folder, "{}", ELASTIC_PACE="0.1")
    assert wait_until(lambda: steps(folder) >= 10, 120), errors(tmp_path)
    job.send_signal(signal.SIGSTOP)
    time.sleep(12)  # longer than a channel may be silent
    job.send_signal(signal.SIGCONT)
    assert job.wait(timeout=240) == 0, errors(tmp_path)
    found = that_count(told(folder))
    assert sorted(found) == list(range(1, 91))
    assert {step: line.loss for step, line in found.items()} == undisturbed(tmp_path / "reference", found, {})
    assert wait_until(lambda: not belongings(tmp_path), 15), belongings(tmp_path)


@pytest.mark.parametrize("words", [["--nproc", 2], LOCAL], ids=["one machine", "two hosts"])
def test_a_launcher_that_was_killed_leaves_nothing_behind_and_the_next_goes_on(
    tmp_path: Path, words: list[Any]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder = tmp_path / "checkpoints"
    elastic = ["--elastic", "1:2" if words is LOCAL else "2:2", "--restarts", 5]
    job = start(tmp_path, *words, *elastic, TRAINING, 10_000, folder, "{}", ELASTIC_PACE="0.05")
    assert wait_until(lambda: steps(folder) >= 10, 120), errors(tmp_path)
    job.kill()
    job.wait()
    assert wait_until(lambda: not belongings(tmp_path), 20), belongings(tmp_path)
    saved = saved_step(folder)
    assert saved >= steps(folder) - 3
    again = start(tmp_path, *words, *elastic, TRAINING, saved + 6, folder, "{}")
    assert again.wait(timeout=120) == 0, errors(tmp_path)
    found = that_count(told(folder))
    assert sorted(found) == list(range(1, saved + 7))
    assert {step: line.loss for step, line in found.items()} == undisturbed(tmp_path / "reference", found, {})
