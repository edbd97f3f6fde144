"""What is said of a job that stands still, before anybody has to ask."""

from __future__ import annotations

import os
import signal

import pytest
from conftest import Lines, wait_until

from zero_launch.desync import FlightRecord, RecordedCollective, abandoned
from zero_launch.presence import HostPresence, Presence


def test_ranks_that_wait_say_for_whom_and_where_and_at_once_when_that_one_has_ended_well(start, write_script, tmp_path):
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("enough"):
                time.sleep(0.1)
            sys.exit(0)
        import torch.distributed as dist
        dist.init_process_group("gloo")
    """
    job = start("--nproc", 2, write_script(script))
    said = Lines(job.stderr)
    assert said.have(r"waiting for 1 of 2 ranks at 127\.0\.0\.1:\d+: rank 1 has not come", 90), said.text
    (tmp_path / "enough").touch()
    pattern = r"rank 1 ended with exit status 0 without coming to 127\.0\.0\.1:\d+, where rank 0 waits"
    assert said.have(pattern, 10), said.text
    assert job.poll() is None


def test_a_stopped_rank_is_named_and_a_slow_one_is_not(start, write_script, tmp_path):
    script = write_script(
        "import os\nopen('pid' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "while not os.path.exists('enough'): sum(range(10000))"
    )
    job = start("--nproc", 2, "--silence", 2, script)
    said = Lines(job.stderr)
    assert wait_until(
        lambda: all((tmp_path / f"pid{n}").exists() and (tmp_path / f"pid{n}").read_text() for n in (0, 1)), 30
    )
    pid = int((tmp_path / "pid1").read_text())
    os.kill(pid, signal.SIGSTOP)
    assert said.have(rf"rank 1 \(pid {pid}\) has been stopped for 2 s, as by SIGSTOP", 30)
    os.kill(pid, signal.SIGCONT)
    assert said.have("rank 1 continues", 30)
    (tmp_path / "enough").touch()
    assert job.wait(30) == 0
    assert "rank 0" not in said.text


def test_whoever_waits_for_a_rank_that_has_ended_is_found_in_the_rings():
    entries = tuple(
        RecordedCollective(n, n, 5, 64, "1", "gather", name, "train.py:3") for n, name in enumerate("abc", start=1)
    )
    records = {0: FlightRecord(entries, 3, 2, 3), 1: FlightRecord(entries[:2], 2, 2, 0)}
    text = abandoned(records, [1], is_over=False)
    assert text == (
        "rank 1 ended with exit status 0 while others wait for it:\n"
        "  rank 0 waits in gather of 'c' in step 5, 64 bytes at train.py:3"
    )
    assert abandoned(records, [], is_over=False) is None
    assert (
        abandoned({0: records[0], 1: FlightRecord(entries, 3, 3, 0)}, [1], is_over=False) is None
    )  # it asked for that too
    assert abandoned({0: FlightRecord(entries, 3, 3, 0), 1: records[1]}, [1], is_over=False) is None  # nobody waits


def test_whoever_waits_no_longer_counts_only_once_the_job_has_failed():
    group = [RecordedCollective(n, n, 5, 64, "1", "gather", name, "") for n, name in enumerate("abc", start=1)]
    question = RecordedCollective(4, 1, 5, 0, "2", "control", "failed", "")
    ended = FlightRecord((*group[:2], RecordedCollective(3, 0, 5, 0, "2", "control", "begin", "")), 3, 3, 0)
    gave_up = FlightRecord((*group, question), 4, 2, 0, failed=3)
    assert abandoned({0: gave_up, 1: ended}, [1], is_over=False) is None  # it may sleep, clean up or end
    assert "rank 0 waited in gather of 'c'" in abandoned({0: gave_up, 1: ended}, [1], is_over=True)
    asks = FlightRecord((*group, question), 4, 3, 4)
    assert abandoned({0: asks, 1: ended}, [1], is_over=False) is None  # that wait ends by itself


def test_a_rank_that_came_and_ended_between_two_looks_has_come():
    here, presence = HostPresence({0: os.getpid(), 1: os.getpid()}, 1, 4.0), Presence(2, "127.0.0.1:1")
    assert here.find_arrivals([0], {0, 1}) and here.arrived == {0, 1}
    presence.update(here.arrived, [0])
    assert not [text for text in presence.remarks() if "without coming" in text]
    assert not here.find_arrivals([0], {0, 1})


def test_each_thing_is_said_once_and_nothing_of_a_job_that_goes_on(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    presence = Presence(3, "here:1")
    clock[0] += 60
    assert presence.remarks() == []  # it may not use torch.distributed at all
    presence.update([0, 2], [])
    assert presence.remarks() == []
    clock[0] += 6
    assert presence.remarks() == ["waiting for 1 of 3 ranks at here:1: rank 1 has not come"]
    clock[0] += 60
    assert presence.remarks() == []
    presence.update([0, 1, 2], [])
    clock[0] += 60
    assert presence.remarks() == []
    presence.update([], [0, 1])
    clock[0] += 2
    assert presence.remarks() == ["ranks 0, 1 ended with exit status 0 while rank 2 still runs"]
    assert presence.remarks() == []
    presence.update([], [2])
    assert presence.remarks() == []


@pytest.mark.parametrize("seconds", ["1", "nan"])
def test_a_silence_that_a_living_host_would_break_is_refused(run, write_script, seconds):
    done = run("--silence", seconds, "--nproc", 1, write_script("pass"))
    assert (done.returncode, "silence_seconds must be at least 2" in done.stderr) == (2, True), done.stderr
