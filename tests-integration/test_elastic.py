"""Jobs that continue when ranks and hosts are lost, and grow when they come back."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _elastic_training
import psutil
import pytest
from launch_hosts import wait_until

from zero_comm import run_ranks

VIRTUAL = {"deterministic": {"across_world_sizes": 2}}
EVERY = _elastic_training.EVERY
GROWN = 0
"""As the number of steps: until ranks have come back and taken a few."""
IN_MEMORY = json.dumps({"checkpoint": {"in_memory": {"every": 1}}})
TRAINING = Path(__file__).with_name("_elastic_training.py")


@dataclass(frozen=True)
class Line:
    """One step as rank 0 told it."""

    step: int
    world: int
    samples: int
    loss: str
    at: float


def told(folder: Path) -> list[Line]:
    rows = [line.split() for line in (folder.parent / f"{folder.name}.losses").read_text().splitlines()]
    return [Line(int(step), int(world), int(samples), loss, float(at)) for step, world, samples, loss, at in rows]


def that_count(lines: list[Line]) -> dict[int, Line]:
    """Of steps that were repeated, the last."""
    return {line.step: line for line in lines}


def launch(tmp_path: Path, *words: object, seconds: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zero_launch", *map(str, words)]
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=seconds, env=env)


def undisturbed(folder: Path, worlds: dict[int, Line], changes: dict[str, Any]) -> dict[int, str]:
    """The losses of runs that end where the number of ranks changes; under virtual ranks, of one rank all the time."""
    steps = sorted(worlds)
    ends = [step for step in steps if step == steps[-1] or worlds[step + 1].world != worlds[step].world]
    for end in ends[-1:] if changes else ends:
        run_ranks(part, 1 if changes else worlds[end].world, end, folder, changes)
    return {line.step: line.loss for line in told(folder)}


def part(end: int, folder: Path, changes: dict[str, Any]) -> None:
    _elastic_training.train(end, folder, changes, [])


def pauses(lines: list[Line]) -> list[float]:
    """Seconds between two lines where a step was repeated or the number of ranks changed."""
    return [b.at - a.at for a, b in itertools.pairwise(lines) if b.step <= a.step or b.world != a.world]


@pytest.mark.soak
def test_a_killed_rank_starts_again_and_the_job_has_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = launch(tmp_path, "--elastic", "1:2", "--restarts", 1, TRAINING, 9, folder, "{}", "rank:0:1:4")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 failed first: died of SIGKILL" in done.stderr and "restart 1 of 1" in done.stderr
    found = that_count(told(folder))
    assert {step: line.world for step, line in found.items()} == dict.fromkeys(range(1, 10), 2)
    assert [found[step].samples for step in sorted(found)] == [4 * step for step in range(1, 10)]
    expected = undisturbed(tmp_path / "reference", found, {})
    assert {step: line.loss for step, line in found.items()} == expected
    print(f"from the last step before to the first after: {pauses(told(folder))} s")


@pytest.mark.parametrize("changes", [VIRTUAL, pytest.param({}, marks=pytest.mark.soak)], ids=["virtual ranks", "plain"])
def test_a_lost_host_shrinks_the_world_and_its_return_grows_it_at_a_checkpoint(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder = tmp_path / "checkpoints"
    words = ["--hostfile", "hosts", "--launcher", "local", "--elastic", "1:2", "--restarts", 1]
    done = launch(tmp_path, *words, TRAINING, GROWN, folder, json.dumps(changes), "host:0:1:4")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 failed first: host b was lost" in done.stderr and "restart 1 of 1" in done.stderr
    assert "host b is back" in done.stderr
    found = that_count(told(folder))
    worlds = [line.world for _, line in sorted(found.items())]
    shrunk, grown = worlds.index(1), len(worlds) - worlds[::-1].index(1)
    assert shrunk == EVERY and grown % EVERY == 0  # it continued from the last checkpoint, and grew at one
    assert set(worlds[:shrunk]) == set(worlds[grown:]) == {2} and set(worlds[shrunk:grown]) == {1}
    assert (tmp_path / "checkpoints.parent.2.1").read_text() == _elastic_training.STANDBY  # with torch imported
    repeated = [line.step for before, line in itertools.pairwise(told(folder)) if line.step <= before.step]
    assert repeated == [EVERY + 1]  # nothing was thrown away to grow
    expected = undisturbed(tmp_path / "reference", found, changes)
    assert {step: line.loss for step, line in found.items()} == expected
    print(f"from the last step before to the first after: {pauses(told(folder))} s")


def signal_all(job: subprocess.Popen[str], signum: int) -> None:
    """Send a signal to the launcher and to all that it has started."""
    launcher = psutil.Process(job.pid)
    for process in [*launcher.children(recursive=True), launcher]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


SCONTROL = """#!/bin/sh
echo "$@" >> "$SCONTROL_CALLS"
exit "${SCONTROL_STATUS:-0}"
"""
LOCAL = ["--hostfile", "hosts", "--launcher", "local"]


@pytest.mark.parametrize(
    ("words", "signum", "refused", "changes"),
    [
        (["--nproc", 1], signal.SIGUSR1, False, "{}"),
        (["--nproc", 1], signal.SIGUSR1, False, IN_MEMORY),
        pytest.param(["--nproc", 2], signal.SIGUSR1, False, "{}", marks=pytest.mark.soak),
        pytest.param(["--nproc", 2], signal.SIGTERM, True, "{}", marks=pytest.mark.soak),
        pytest.param(LOCAL, signal.SIGUSR1, False, "{}", marks=pytest.mark.soak),
        pytest.param([*LOCAL, "--elastic", "1:2"], signal.SIGTERM, False, "{}", marks=pytest.mark.soak),
    ],
)
def test_a_job_that_is_asked_to_end_saves_goes_back_into_the_queue_and_goes_on_with_the_next_step(
    tmp_path: Path, words: list[Any], signum: int, refused: bool, changes: str
) -> None:
    folder, calls, scontrol = tmp_path / "checkpoints", tmp_path / "calls", tmp_path / "bin" / "scontrol"
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    env = {**os.environ, "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    env |= {"SCONTROL_CALLS": str(calls), "SCONTROL_STATUS": str(int(refused)), "ELASTIC_PACE": "0.1"}
    command = [sys.executable, "-m", "zero_launch", "--requeue", *words, TRAINING, 10_000, folder, changes]
    job = subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: (tmp_path / "checkpoints.losses").exists() and len(told(folder)) > EVERY, 60)
        if signum == signal.SIGUSR1:  # Slurm sends it to every process of a job's step
            signal_all(job, signum)
        else:
            job.send_signal(signum)
        _, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == (1 if refused else 75), err
    assert calls.read_text() == "requeue 4711\n"
    assert "a checkpoint is saved" in err and "Traceback" not in err
    last = told(folder)[-1].step
    assert (folder / "latest").read_text().strip() == f"global_step{last + 1}"  # it left inside the step that followed
    if words[-1] == 1:
        return  # what follows takes its time
    done = launch(tmp_path, "--nproc", 2, TRAINING, last + 3, folder, "{}")
    assert done.returncode == 0, done.stderr
    assert [line.step for line in told(folder)] == [*range(1, last + 1), last + 2, last + 3]
