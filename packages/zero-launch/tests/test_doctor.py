"""The doctor's report on hosts that lack something, or hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_launch import doctor, facts
from zero_launch.cli import main
from zero_launch.hostfile import Hostfile
from zero_launch.transport import Transport


def test_a_host_without_shared_memory_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {**facts.examination(str(Path.cwd())), "shared_memory_free": None, "memlock": None}
    monkeypatch.setattr(doctor, "examination", lambda folder: found)
    doctor.main(["--local"])
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    }
    assert (rows["/dev/shm free"], rows["memlock"]) == ("none", "unlimited")


def test_a_program_that_closes_its_output_and_lives_on_does_not_hold_the_doctor_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 60 >&- <&-\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    (report,) = doctor.examine(Hostfile({"a": (0,)}), Transport("ssh"))
    assert time.monotonic() - began < 30
    assert report.facts is None and report.trouble == "the connection was closed"


def test_what_hosts_say_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [doctor.HostReport("a", trouble="no such file [/opt/env]"), doctor.HostReport("b", trouble="[red] shell")]
    problems, _ = doctor.diagnose(reports)
    doctor._print_report(reports, problems, ["c: [/]"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == ["problem a: no such file [/opt/env]", "problem b: [red] shell", "note c: [/]"]


@pytest.mark.parametrize("words", [["doctor"], ["slurm-script", "--nodes", "1", "--nproc", "1", "t.py"], ["train.py"]])
def test_a_command_says_when_its_working_directory_no_longer_exists(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(words) == 2
    assert capsys.readouterr().err == "zero-launch: the working directory no longer exists: change to one that does\n"


@pytest.mark.parametrize(("words", "bar"), [(["--local"], "this machine"), (["--hostfile", "hosts"], "2/2")])
def test_a_terminal_shows_that_hosts_are_examined(
    words: list[str], bar: str, tmp_path: Path, read_terminal: Callable[[int], bytes]
) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    command = [sys.executable, "-m", "zero_launch", "doctor", "--launcher", "local", *words]
    ours, theirs = os.openpty()
    job = subprocess.Popen(command, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, text=True)
    os.close(theirs)
    shown = read_terminal(ours)
    printed, _ = job.communicate()
    assert bar in shown.decode(), shown
    assert "hosts of the job" in printed and "\x1b" not in printed
