"""A damaged record: what is whole is read, what is not is left out and named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from records import paged, write
from simulated import Simulation, simulate

from zero_report import RecordError, read_run
from zero_report.analysis.analyse import analyse
from zero_report.page.data import page_data
from zero_report.record import lines


@pytest.mark.parametrize("part", ["table", "timeline", "notes"])
def test_a_damaged_line_is_left_out_and_said(tmp_path: Path, part: str) -> None:
    write(tmp_path, 20)
    file = tmp_path / "attempt-0000" / f"rank-00000.{part}"
    data = bytearray(file.read_bytes())
    data[data.index(b"\n") + 30 if part != "notes" else 30] ^= 1
    file.write_bytes(data)
    run = read_run(tmp_path)
    assert len(run.problems) == 1
    assert f"rank-00000.{part}: 1 damaged or cut line" in run.problems[0]
    assert run.last.first.table["steps"].sum() == (19 if part == "table" else 20)
    assert len(run.last.first.steps) == (19 if part == "timeline" else 20)


@pytest.mark.parametrize("part", ["table", "timeline", "notes"])
def test_a_file_cut_anywhere_is_read_as_far_as_it_is_whole(tmp_path: Path, part: str) -> None:
    write(tmp_path, 6)
    file = tmp_path / "attempt-0000" / f"rank-00000.{part}"
    data = file.read_bytes()
    for size in range(0, len(data), max(1, len(data) // 60)):
        file.write_bytes(data[:size])
        run = read_run(tmp_path)
        whole = data[:size].count(b"\n")
        missing = size == 0 and part != "timeline"  # a rank that has not computed yet has no steps
        assert bool(run.problems) == (missing or (not data[:size].endswith(b"\n") and size > 0))
        if part == "table":
            assert len(run.last.first.table["first"]) == max(0, whole - 1)
        elif part == "timeline":
            assert len(run.last.first.steps) == whole


@pytest.mark.parametrize("part", ["table", "timeline", "notes"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_one_of_its_files_hides_nothing_of_the_others(tmp_path: Path, part: str, rank: int) -> None:
    simulate(tmp_path, Simulation(ranks=3, steps=20, compute={2: 1.5}))
    (tmp_path / "attempt-0000" / f"rank-0000{rank}.{part}").unlink()
    run = paged(tmp_path)
    data = page_data(run, analyse(run))
    (problem,) = data["problems"]
    assert f"rank-0000{rank}.{part}: cannot be read" in problem
    assert data["verdict"]["sentence"].startswith("Rank 2 is slower than ")
    assert (data["totals"]["steps"], data["totals"]["samples"], data["ranks"]) == (20, 20 * 64, 3)
    assert data["curves"]["lr"][-1] == pytest.approx(3e-4)
    assert [step["step"] for step in data["steps"]["steps"]][-2:] == [19, 20]
    assert bool(data["configuration"]) == ((rank, part) != (0, "notes"))


def test_a_record_without_spans_does_not_say_that_no_step_is_over(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(ranks=2, steps=20))
    for rank in range(2):
        (tmp_path / "attempt-0000" / f"rank-0000{rank}.timeline").write_bytes(b"")
    assert (
        analyse(paged(tmp_path)).verdict.sentence == "The record has no spans of a whole step, so no causes of waiting."
    )


def test_a_missing_head_of_the_first_rank_leaves_the_world_size_of_the_others(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, 3, rank=rank, world_size=12)
    (tmp_path / "attempt-0000" / "rank-00000.notes").write_bytes(b"")
    run = paged(tmp_path)
    assert run.last.world_size == 12
    assert run.problems[0] == "attempt-0000/rank-00000.notes: is empty"


def test_noise_instead_of_a_record_is_no_crash(tmp_path: Path) -> None:
    write(tmp_path, 3)
    chance = np.random.default_rng(0)
    for file in (tmp_path / "attempt-0000").iterdir():
        file.write_bytes(chance.bytes(5000))
    run = read_run(tmp_path)
    assert len(run.problems) == 3
    assert len(run.last.first.table["first"]) == 0


OTHER_JSON: list[object] = [
    None,
    True,
    7,
    -1.5,
    1e308,
    "soon",
    [],
    [1, [2]],
    {},
    {"note": "head", "at": "x"},
    {"step": 1},
]
FAILURES: list[object] = [
    *(value for value in OTHER_JSON if not isinstance(value, dict)),
    *({"at": value} for value in OTHER_JSON if not isinstance(value, int | float) or value is True),
    *({name: value} for name in ("text", "detail", "interrupted") for value in (None, 3, [])),
    *({"flight": value} for value in (None, 3, {}, [{"rank": 0, "last": 3}])),
]


@pytest.mark.parametrize("value", FAILURES, ids=json.dumps)
def test_a_failure_of_another_shape_is_said_and_left_out(tmp_path: Path, value: object) -> None:
    write(tmp_path, 3)
    (tmp_path / "failure.json").write_text(json.dumps(value))
    run = paged(tmp_path)
    assert run.failure is None
    assert [problem[:12] for problem in run.problems] == ["failure.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "\x00", "9" * 5000], ids=["none", "cut", "deep", "zero", "long"]
)
def test_a_failure_that_is_no_json_is_said_and_left_out(tmp_path: Path, text: str) -> None:
    write(tmp_path, 3)
    (tmp_path / "failure.json").write_text(text)
    run = paged(tmp_path)
    assert run.failure is None and [problem[:12] for problem in run.problems] == ["failure.json"]


@pytest.mark.parametrize("value", OTHER_JSON, ids=json.dumps)
@pytest.mark.parametrize("part", ["notes", "table", "timeline"])
@pytest.mark.parametrize("whole", [False, True])
def test_other_json_with_and_without_checksum_is_said(tmp_path: Path, part: str, value: object, whole: bool) -> None:
    write(tmp_path, 3)
    file = tmp_path / "attempt-0000" / f"rank-00000.{part}"
    line = lines.encode(value) if whole else json.dumps(value).encode()
    for data in (line, file.read_bytes() + line, line + file.read_bytes()):
        file.write_bytes(data)
        problems = paged(tmp_path).problems
        if not (whole and part == "timeline" and value == {"step": 1}):  # it is left out when the step is asked for
            assert problems and all(f"rank-00000.{part}" in problem for problem in problems)


HEAD = {"note": "head", "at": 0.0, "schema": 1, "rank": 0, "world_size": 1, "began": 0.0, "facts": {}}
NOTES: list[dict[str, object]] = [
    *({**HEAD, name: value} for name in ("schema", "world_size", "began") for value in (None, "x", [1], {"a": 1})),
    *({**HEAD, "facts": value} for value in (None, "x", [1])),
    *({**HEAD, "world_size": value} for value in (0, -1, 1.5, True)),
    *({**HEAD, "facts": {name: 3}} for name in ("configuration", "machine", "versions")),
    *({"note": "checkpoint", "at": 0.0, name: "x"} for name in ("of_step", "step", "bytes", "seconds", "blocked_s")),
    *({"note": "peak", "at": 0.0, "link": "drive in", "bytes_per_second": value} for value in (None, "x")),
    {"note": "plan", "at": 0.0, "bytes": "x"},
    {"note": "warning", "at": 0.0, "step": "x"},
    {"note": "warning", "at": None},
    {"note": 3, "at": 0.0},
]
SPOILED: list[dict[str, object]] = [
    {"names": 3},
    {"spans": [0, 9, 0, 0, 0, 0]},
    {"spans": [99, 0, 0, 0, 0, 0]},
    {"spans": [1]},
    {"us": "x"},
    {"memory": [3]},
    {"memory": [[0, {"states": "x"}]]},
    {"began": None},
    {"open": 3},
    {"under_way": None},
]


@pytest.mark.parametrize("note", NOTES, ids=json.dumps)
def test_notes_with_facts_of_other_types_are_said_and_left_out(tmp_path: Path, note: dict[str, object]) -> None:
    write(tmp_path, 3)
    file = tmp_path / "attempt-0000" / "rank-00000.notes"
    data = file.read_bytes()
    head = data.index(b"\n") + 1 if note["note"] == "head" else 0
    file.write_bytes(data[head:] if head else data)
    file.write_bytes(lines.encode(note) + file.read_bytes() if head else data + lines.encode(note))
    problems = paged(tmp_path).problems
    assert len(problems) == 1 and "rank-00000.notes: 1 of" in problems[0]


def test_a_world_size_beyond_memory_is_no_crash(tmp_path: Path) -> None:
    write(tmp_path, 3)
    file = tmp_path / "attempt-0000" / "rank-00000.notes"
    file.write_bytes(lines.encode({**HEAD, "world_size": 10**15}))
    (problem,) = read_run(tmp_path).problems
    assert problem.endswith("ranks wrote nothing: 1, 2, 3, 4, 5, 6, 7, 8 and 999999999999991 more")


@pytest.mark.parametrize("spoiled", SPOILED, ids=json.dumps)
def test_a_step_that_is_not_laid_out_as_one_has_no_spans(tmp_path: Path, spoiled: dict[str, object]) -> None:
    write(tmp_path, 3)
    block = {"step": 3, "began": 0.0, "us": 1, "names": ["a"], "spans": [1, 0, 0, 1, 0, 0], "left_out": 0, "memory": []}
    file = tmp_path / "attempt-0000" / "rank-00000.timeline"
    file.write_bytes(file.read_bytes() + lines.encode(block))
    record = paged(tmp_path).last.first
    assert record.block(3) is not None
    file.write_bytes(file.read_bytes() + lines.encode({**block, **spoiled}))
    record = paged(tmp_path).last.first
    assert record.block(3) is None and record.block(2) is not None


@pytest.mark.parametrize(
    "name",
    [
        "failure.json",
        "attempt-0000/rank-00000.notes",
        "attempt-0000/rank-00000.table",
        "attempt-0000/rank-00000.timeline",
        "attempt-0001",
    ],
)
@pytest.mark.parametrize("how", ["folder", "pipe", "unreadable", "loop"])
def test_what_lies_in_place_of_a_file_is_said(tmp_path: Path, name: str, how: str) -> None:
    write(tmp_path, 3)
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if how == "folder" and name != "attempt-0001":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    elif how == "unreadable":
        file.symlink_to("/proc/self/mem")
    else:
        file.symlink_to(file)
    (problem,) = paged(tmp_path).problems
    assert problem.startswith(name)


def test_missing_ranks_are_said(tmp_path: Path) -> None:
    write(tmp_path, 3, world_size=12)
    problems = read_run(tmp_path).problems
    assert problems == ["attempt-0000: 11 of 12 ranks wrote nothing: 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"]


def test_no_record_is_an_error_that_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r'"run_record": \{"path"'):
        read_run(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 3)
    file = tmp_path / "attempt-0000" / "rank-00000.notes"
    file.write_bytes(lines.encode({"note": "head", "at": 0, "schema": 99, "world_size": 1}))
    with pytest.raises(RecordError, match="schema 99, this zero-report reads up to 1"):
        read_run(tmp_path)
