"""The elastic job of many accidents: four ranks on three hosts (network namespaces), some of which die all the time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import launch_hosts
import psutil
import pytest
from launch_hosts import NAMES, Hosts, kill, wait_until
from test_elastic import TRAINING, Line, that_count, told, undisturbed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = int(os.environ.get("ZERO_ELASTIC_STEPS", "400"))
ACCIDENTS = int(os.environ.get("ZERO_ELASTIC_ACCIDENTS", "20"))
RECOVERY_SECONDS = 15
STEPS_BETWEEN = 8
KINDS = ("rank", "rank", "agent", "link")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    reason = launch_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(tmp_path) as hosts:
        yield hosts


def lines(folder: Path) -> list[Line]:
    return told(folder) if (folder.parent / f"{folder.name}.losses").exists() else []


def victims(hosts: Hosts, name: str, module: str) -> list[psutil.Process]:
    """The hands or ranks on a host, without those that are no ranks yet."""
    found = []
    for process in hosts.processes(name):
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            words = process.cmdline()
            if f"zero_launch.{module}" in words and words[0] != "/bin/sh" and process.name() != "zero-standby":
                found.append(process)
    return found


class Accidents:
    """Takes ranks, agents and links away, one after another, and brings links back.

    Hosts come back later than others recover, so often the ranks are all on one host. There only ranks are killed: what
    takes the last host away is over when another has come back.
    """

    def __init__(self, hosts: Hosts, folder: Path, chance: random.Random) -> None:
        self._hosts, self._folder, self._chance = hosts, folder, chance
        self._unplugged: dict[str, float] = {}
        self.recoveries: list[tuple[str, float]] = []

    def run(self, job: subprocess.Popen[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        count = 0
        while job.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            self._plug(time.monotonic())
            if len(self.recoveries) < ACCIDENTS and len(lines(self._folder)) >= count + STEPS_BETWEEN:
                self._one(job)
                count = len(lines(self._folder))

    def _plug(self, now: float) -> None:
        for name in [name for name, at in self._unplugged.items() if now >= at]:
            del self._unplugged[name]
            self._hosts.plug(name)

    def _one(self, job: subprocess.Popen[str]) -> None:
        there = [name for name in NAMES if name not in self._unplugged and self._ranks(name)]
        kind = self._chance.choice(KINDS if len(there) > 1 else KINDS[:1])
        name = self._chance.choice(there)
        before = len(lines(self._folder))
        began = time.time()
        if kind == "link":
            self._hosts.unplug(name)
            self._unplugged[name] = time.monotonic() + 10
        else:
            found = self._ranks(name) if kind == "rank" else victims(self._hosts, name, "host")
            kill(self._chance.choice(found))
        while job.poll() is None:
            new = lines(self._folder)[before:]
            after = [line for line in new if line.at > began + 0.5]
            if after:
                break
            self._plug(time.monotonic())
            time.sleep(0.05)
        else:
            return
        self.recoveries.append((f"{kind} on {name}", after[0].at - began))

    def _ranks(self, name: str) -> list[psutil.Process]:
        return victims(self._hosts, name, "rank")


def test_a_job_of_many_accidents_ends_by_itself_with_the_losses_of_an_undisturbed_one(
    hosts: Hosts, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("alpha slots=2\nbeta slots=1\ngamma slots=1\n")
    words = ["--elastic", "1:4", "--restarts", 3 * ACCIDENTS, "--hostfile", hostfile]
    errors = tmp_path / "errors"  # more than a pipe holds
    job = hosts.launch(*words, TRAINING, STEPS, folder, "{}", errors=errors, ELASTIC_PACE="0.2")
    accidents = Accidents(hosts, folder, random.Random(5))
    accidents.run(job, 60 + 30 * ACCIDENTS)
    job.wait(timeout=120)
    err = errors.read_text()
    for what, seconds in accidents.recoveries:
        print(f"{what}: {seconds:.1f} s from the accident to the next step")
    assert job.returncode == 0, err[-6000:]
    assert len(accidents.recoveries) == ACCIDENTS, err[-6000:]
    found = that_count(lines(folder))
    assert sorted(found) == list(range(1, STEPS + 1))
    print("steps by number of ranks:", {w: sum(line.world == w for line in found.values()) for w in range(1, 5)})
    assert {step: line.loss for step, line in found.items()} == undisturbed(tmp_path / "reference", found, {})
    assert max(seconds for _, seconds in accidents.recoveries) <= RECOVERY_SECONDS


def test_one_lost_host_goes_on_from_its_neighbours_memory_and_two_from_the_disk(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("alpha slots=1\nbeta slots=1\ngamma slots=1\n")
    changes = {"checkpoint": {"in_memory": {"every": 2, "path": str(hosts.memory / "copies")}}}
    words = ["--elastic", "1:3", "--restarts", 4, "--hostfile", hostfile, TRAINING, 90, folder, json.dumps(changes)]
    job = hosts.launch(*words, ELASTIC_PACE="0.3", ELASTIC_EVERY="30")
    assert wait_until(lambda: len(lines(folder)) >= 35 or job.poll() is not None, 120)
    assert job.poll() is None, job.communicate()[1][-6000:]
    hosts.lose("beta")
    assert wait_until(lambda: any(line.world == 2 for line in lines(folder)), 60)
    count = len(lines(folder))
    assert wait_until(lambda: sum(line.world == 3 for line in lines(folder)[count:]) >= 6, 120)
    assert wait_until(lambda: lines(folder)[-1].step >= 65, 120)
    for name in ("beta", "gamma"):
        hosts.lose(name)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 0, err[-6000:]
    sources = re.findall(r"resumed from (memory|disk) after step (\d+)", err)
    print(sources)
    from_disk = [int(step) for source, step in sources if source == "disk"]
    assert sources[0][0] == "memory" and int(sources[0][1]) >= 34
    assert from_disk == [60]
    found = that_count(lines(folder))
    left = {int(step) for step in re.findall(r"leaving after step (\d+)", err)}  # inside `step`, before it is told of
    left -= found.keys()  # after a recovery from the disk some are done again, and told of
    assert sorted(found) == [step for step in range(1, 91) if step not in left]
    monkeypatch.setenv("ELASTIC_EVERY", "2")  # the number of ranks changes after steps that are in memory alone
    worlds = found | {step: found[step - 1] for step in left}
    expected = undisturbed(tmp_path / "reference", worlds, {})
    assert {step: line.loss for step, line in found.items()} == {step: expected[step] for step in found}


LOOP = """
import os, time
attempt, rank, size = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
open(f"round{attempt}.{rank}.{size}", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.1)
"""


def test_a_host_that_was_frozen_and_wakes_up_later_does_no_harm_to_its_successor(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    errors = tmp_path / "errors"
    job = hosts.launch("--elastic", "1:2", "--restarts", 3, "--hostfile", "hosts", "loop.py", errors=errors)
    assert wait_until(lambda: len(list(tmp_path.glob("round0.*.2"))) == 2, 60)
    (rank,), (hand,) = victims(hosts, "beta", "rank"), victims(hosts, "beta", "host")
    hand.suspend()
    rank.suspend()
    assert wait_until((tmp_path / "round1.0.1").exists, 60)
    assert wait_until(lambda: len(victims(hosts, "beta", "host")) == 2, 60)
    assert wait_until(lambda: "host beta is back" in errors.read_text(), 60)
    kill(*victims(hosts, "alpha", "rank"))
    assert wait_until((tmp_path / "round2.1.2").exists, 60)
    assert rank not in victims(hosts, "beta", "rank")  # what the frozen hand left is ended before others begin
    hand.resume()
    assert wait_until(lambda: len(victims(hosts, "beta", "host")) == 1, 30)
    assert len(victims(hosts, "beta", "rank")) == 1
    (tmp_path / "enough").touch()
    job.wait(timeout=60)
    err = errors.read_text()
    assert job.returncode == 0, err
    assert "restart 2 of 3" in err and "restart 3 of 3" not in err


@pytest.mark.parametrize("ahead", [-7200, 7200])
def test_a_host_whose_clock_is_hours_off_takes_part_and_comes_back(tmp_path: Path, ahead: int) -> None:
    reason = launch_hosts.why_not() or (None if shutil.which("cc") else "no C compiler")
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\n")
    with Hosts(tmp_path, {"beta": ahead}) as hosts:
        errors = tmp_path / "errors"
        job = hosts.launch("--elastic", "1:2", "--restarts", 3, "--hostfile", "hosts", "loop.py", errors=errors)
        assert wait_until(lambda: len(list(tmp_path.glob("round0.*.2"))) == 2, 60)
        kill(*victims(hosts, "beta", "host"))
        assert wait_until((tmp_path / "round1.0.1").exists, 60)
        assert wait_until(lambda: len(victims(hosts, "beta", "host")) == 1, 60)
        assert wait_until(lambda: "host beta is back" in errors.read_text(), 60)
        kill(*victims(hosts, "alpha", "rank"))
        assert wait_until((tmp_path / "round2.1.2").exists, 60)
        (tmp_path / "enough").touch()
        job.wait(timeout=60)
        err = errors.read_text()
    assert job.returncode == 0, err
    assert "restart 2 of 3" in err and "restart 3 of 3" not in err
