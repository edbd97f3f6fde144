"""The command line, the trace and the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from simulated import Simulation, simulate
from test_page import data_of

import zero_report
from zero_report import RecordWriter, make_report, read_run
from zero_report.cli import main
from zero_report.live import live


def test_the_command_writes_a_page_and_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(tmp_path, Simulation(steps=5))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert data_of(tmp_path / "report.html")["totals"]["steps"] == 5


def test_open_gives_the_page_to_the_browser(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(steps=3))
    browser, asked = tmp_path / "browser", tmp_path / "asked"
    browser.write_text(f'#!/bin/sh\necho "$1" > {asked}\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "zero_report", str(tmp_path), "--open"]
    subprocess.run(command, env={**os.environ, "BROWSER": f"{browser} %s"}, check=True, capture_output=True)
    assert asked.read_text().strip() == (tmp_path / "report.html").as_uri()


def test_no_record_is_exit_status_1_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1
    assert "expected a record" in capsys.readouterr().err


def test_watching_ends_with_the_run_and_leaves_a_page_that_does_not_reload(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=1, steps=5, close=False))
    ended = data_of(zero_report.write_report(tmp_path, refresh=1))["verdict"]["ended"]
    assert ended == "Rank 0 stopped after step 5: it was killed, or its machine was lost."
    assert 'http-equiv="refresh" content="1"' in (tmp_path / "report.html").read_text()

    def end() -> None:
        with_more = RecordWriter(tmp_path, rank=0, world_size=1, attempt=1, first_step=6, background=False)
        with_more.end_step(loss=1.0)
        with_more.close()

    later = threading.Timer(0.3, end)
    later.start()
    assert main([str(tmp_path), "--watch", "--every", "0.1"]) == 0
    assert "refresh" not in (tmp_path / "report.html").read_text().split("</head>")[0].split("<style>")[0]
    assert data_of(tmp_path / "report.html")["totals"]["steps"] == 6


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["--watch", "--live"])
def test_watching_ends_when_the_launcher_has_said_how_a_killed_run_ended(tmp_path: Path, how: str) -> None:
    simulate(tmp_path, Simulation(steps=3, close=False))
    failure = json.dumps({"text": "rank 1 of 2 failed first: boom", "at": time.time()})
    later = threading.Timer(0.3, lambda: (tmp_path / "failure.json").write_text(failure))
    later.start()
    assert main([str(tmp_path), how, "--every", "0.1"]) == 0
    assert (tmp_path / "failure.json").exists()


@pytest.mark.parametrize("option", ["--output", "--perfetto"])
def test_a_file_that_cannot_be_written_is_exit_status_1_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    simulate(tmp_path / "run", Simulation(steps=3))
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "run"), option, str(tmp_path / "file" / "out")]) == 1
    assert re.fullmatch(r"zero-report: .*/file(/out)?: cannot be written: .+\n", capsys.readouterr().err)


def test_a_page_for_a_folder_is_report_html_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(tmp_path / "run", Simulation(steps=3))
    (tmp_path / "pages").mkdir()
    assert main([str(tmp_path / "run"), "--output", str(tmp_path / "pages")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "pages" / "report.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "run"]


def test_a_page_that_cannot_be_put_in_place_leaves_no_file_behind(tmp_path: Path) -> None:
    simulate(tmp_path / "run", Simulation(steps=3))
    report = make_report(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        report.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "soon"])
def test_seconds_between_reads_are_positive(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--live", "--every", seconds])
    assert f"--every: expected seconds above 0, got '{seconds}'" in capsys.readouterr().err


def test_the_trace_holds_every_span_of_every_rank_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(tmp_path, Simulation(ranks=3, steps=6, disk={1: 0.01}))
    assert main([str(tmp_path), "--perfetto", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    whole = [event for event in events if event["ph"] == "X" and event["tid"] % 2 == 0]
    blocks = [record.block(step) for record in read_run(tmp_path).last.ranks.values() for step in range(1, 7)]
    assert len(whole) == sum(len(block.spans) for block in blocks if block is not None)
    assert {event["pid"] for event in whole} == {0, 1, 2}
    assert any(event["ph"] == "X" and event["tid"] % 2 for event in events)  # some were partly waited in
    assert f"trace.json: {len(whole):,} spans" in capsys.readouterr().out


def test_the_terminal_shows_verdict_loss_and_throughput(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=30, data={1: 0.2}))
    out = io.StringIO()
    live(tmp_path, rounds=1, console=Console(file=out, width=100, force_terminal=True, color_system=None))
    assert "Rank 1 waits for its data" in out.getvalue()
    assert "tokens/s" in out.getvalue() and "▁" in out.getvalue()


def test_names_control_no_terminal(tmp_path: Path) -> None:
    clear = "\x1b[2J\x1b]0;owned\x07\x9b2J"
    simulate(tmp_path / clear, Simulation(ranks=1, steps=8, disk={0: 0.1}, names=clear + "{}"))
    out = io.StringIO()
    live(tmp_path / clear, rounds=1, console=Console(file=out, width=200, color_system=None))
    assert "owned" in out.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())


def test_a_notebook_shows_the_page_in_a_frame(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(steps=3))
    shown = make_report(tmp_path)._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and 'sandbox="allow-scripts"' in shown


def test_a_launchers_word_about_the_end_is_on_top(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(steps=3, close=False))
    (tmp_path / "failure.json").write_text(json.dumps({"text": "rank 1 of 2 failed first: boom", "detail": "a\nb"}))
    verdict = data_of(zero_report.write_report(tmp_path))["verdict"]
    assert (verdict["ended"], verdict["detail"], verdict["tone"]) == ("rank 1 of 2 failed first: boom", "a\nb", "bad")


def test_names_of_the_package_are_exact() -> None:
    assert zero_report.__all__ == sorted(zero_report.__all__)
    assert all(hasattr(zero_report, name) for name in zero_report.__all__)


def test_a_terminal_shows_progress_and_a_pipe_does_not(tmp_path: Path) -> None:
    simulate(tmp_path / "record", Simulation(steps=5))
    command = [sys.executable, "-m", "zero_report", "record", "--perfetto", "spans.json"]
    quiet = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert quiet.returncode == 0 and quiet.stderr == b""
    ours, theirs = os.openpty()
    shown = subprocess.run(command, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    text = os.read(ours, 1 << 16)
    os.close(ours)
    assert shown.stdout == quiet.stdout and b"write spans.json" in text and b"report of record" in text, text
