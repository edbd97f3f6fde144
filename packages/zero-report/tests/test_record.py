"""The record: within its bound, readable after a kill, sums exact."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import write

from zero_report import RecordWriter, SpanKind, next_attempt, read_run
from zero_report.record.files import Appended
from zero_report.record.rows import merge_into, merge_steps
from zero_report.record.schema import COLUMN_NAMES, RECENT_STEPS

KILLED = """
import sys, time
from zero_report import SpanKind, RecordWriter
writer = RecordWriter(sys.argv[1], rank=0, world_size=1)
step = 0
while True:
    begin = time.perf_counter()
    time.sleep(0.01)
    writer.span(SpanKind.FORWARD, "forward", begin, time.perf_counter())
    step += 1
    if step == 100:
        writer.span(SpanKind.GATHER, "the one that hangs", begin, time.perf_counter(), 0.001, 8)
        print(time.time(), flush=True)
        time.sleep(60)
    writer.end_step(loss=1.0 / step, samples=1)
"""

FULL = """
import resource, sys, time
from zero_report import SpanKind, RecordWriter

def step(number):
    now = time.perf_counter()
    writer.span(SpanKind.FORWARD, "forward", now, now + 0.001)
    writer.end_step(loss=float(number), samples=1)
    writer.note("warning", text=f"step {number}")
    writer.flush()

writer = RecordWriter(sys.argv[1], rank=0, world_size=1, background=False, max_bytes=int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    if number == 3:  # no file may grow: as on a full disk, writing fails with an OSError
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    step(number)
if sys.argv[4] == "room":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.close()
"""


def test_a_killed_run_can_be_read_up_to_its_last_second(tmp_path: Path) -> None:
    ran = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert ran.stdout is not None
    hung = float(ran.stdout.readline())
    time.sleep(1.0)
    ran.send_signal(signal.SIGKILL)
    ran.wait()
    record = read_run(tmp_path).last.first
    assert not record.closed
    assert record.table["steps"].sum() == 99
    last = record.block(100)
    assert last is not None and last.open
    assert [span.name for span in last.spans] == ["forward", "the one that hangs"]
    assert record.last_written_at() > hung - 1.0


@pytest.mark.parametrize("room_again", [True, False])
@pytest.mark.parametrize(("max_bytes", "steps"), [(1 << 30, 9), (1, 900)], ids=["within its bound", "beyond its bound"])
def test_a_full_disk_ends_no_run_and_what_is_missing_is_written_when_there_is_room(
    tmp_path: Path, max_bytes: int, steps: int, room_again: bool
) -> None:
    words = map(str, (tmp_path, max_bytes, steps, "room" if room_again else "none"))
    ran = subprocess.run([sys.executable, "-c", FULL, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = [f"the record {tmp_path / 'attempt-0000'} cannot be written now; what is missing is kept for later: [Errno"]
    if not room_again:
        said.append(f"the record {tmp_path / 'attempt-0000'} is incomplete: [Errno")
    assert [line.partition(" 27]")[0] for line in ran.stderr.splitlines()] == said
    record = read_run(tmp_path).last.first
    assert record.closed == room_again
    if not room_again:
        return
    assert record.table["steps"].sum() == steps
    assert set(range(steps - RECENT_STEPS + 1, steps + 1)) & set(range(1, steps + 1)) <= set(record.steps)
    if max_bytes > 1:
        assert [note["text"] for note in record.notes if note["note"] == "warning"] == [f"step {n}" for n in range(9)]


@pytest.fixture
def failing_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Descriptors whose close ends with an error, as file systems with a quota may tell of it; it is closed then."""
    failing: list[int] = []
    close = os.close

    def closed(descriptor: int) -> None:
        close(descriptor)
        if descriptor in failing:
            failing.remove(descriptor)
            raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "close", closed)
    yield failing
    monkeypatch.undo()


def test_a_descriptor_whose_close_failed_is_not_used_again(tmp_path: Path, failing_close: list[int]) -> None:
    file = Appended(tmp_path / "table")
    failing_close.append(file._descriptor)
    with pytest.raises(OSError, match="quota"):
        file.replace(b"a\n")
    with (tmp_path / "other").open("w+b") as other:  # may have the number that is free again
        file.append(b"b\n")
        file.close()
        assert other.read() == b""
    assert (tmp_path / "table").read_bytes() == b"a\nb\n"


def test_a_close_that_fails_does_not_end_the_training(tmp_path: Path, failing_close: list[int], caplog: Any) -> None:
    writer = RecordWriter(tmp_path, rank=0, world_size=1, background=False)
    failing_close += [int(name) for name in os.listdir("/proc/self/fd") if is_below(tmp_path, name)]
    assert len(failing_close) >= 3
    writer.close()
    assert "is incomplete: [Errno 122] quota" in caplog.text


def is_below(folder: Path, descriptor: str) -> bool:
    path = Path("/proc/self/fd", descriptor)
    return path.exists() and folder in path.resolve().parents


def test_what_is_under_way_is_in_the_block_of_the_open_step_and_in_no_sum(tmp_path: Path) -> None:
    begin = time.perf_counter()
    running = [(SpanKind.REDUCE, "layers.3", begin, 64), (SpanKind.DATA, "later", begin + 3600, 0)]
    writer = RecordWriter(tmp_path, rank=0, world_size=1, background=False, under_way=lambda: running)
    writer.span(SpanKind.FORWARD, "forward", begin, begin + 0.5)
    writer.flush()
    record = read_run(tmp_path).last.first
    block = record.open_block()
    assert block is not None and block.step == 1 and block.under_way == 1
    assert [(span.kind, span.name, span.waited) for span in block.spans] == [
        (SpanKind.FORWARD, "forward", 0),
        (SpanKind.REDUCE, "layers.3", 0),
    ]
    assert abs(block.spans[1].end - block.us) <= 1
    writer.end_step(loss=1.0)
    writer.close()
    record = read_run(tmp_path).last.first
    assert record.steps == [1] and record.open_block() is None
    assert np.isnan(record.table["sent_bytes"][0])


@pytest.mark.parametrize("keys", [("loss",), ("loss", "lr")])
@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 6, 7), tuple(range(8))])
def test_rows_of_many_steps_become_one_as_if_merged_one_by_one(keys: tuple[str, ...], cuts: tuple[int, ...]) -> None:
    chance = np.random.default_rng(0)
    counted = [{"forward_s": float(chance.random()), "process_bytes": int(chance.integers(1 << 30))} for _ in range(7)]
    counted[4]["gather_wait_s"] = 0.5
    values = [{key: float(chance.random()) for key in keys if step != 3 or key != "lr"} for step in range(7)]
    given: list[dict[str, float | None]] = [{"grad_norm": None, **row} for row in values]  # None: there is no number
    if "lr" in keys:
        given[3]["lr"] = None
    expected = []
    for begin, end in pairwise(cuts):
        rows = [
            {**counted[step], **values[step], "first": step + 1, "steps": 1, "began": 1000.0 + step, "seconds": 0.5}
            for step in range(begin, end)
        ]
        for row in rows[1:]:
            merge_into(rows[0], row)
        expected.append(pytest.approx(rows[0], rel=1e-12))
    steps = [(step + 1, float(step), 0.5, [], 0, None, counted[step], given[step]) for step in range(7)]
    assert merge_steps(steps, [slice(*cut) for cut in pairwise(cuts)], 1000.0) == expected


def test_steps_that_share_no_column_are_merged_too() -> None:
    steps = [
        (1, 0.0, 1.0, [], 0, None, {"read_bytes": 3.0}, {"loss": 1.0}),
        (2, 1.0, 1.0, [], 0, None, {}, {"lr": 0.5}),
    ]
    (row,) = merge_steps(steps, [slice(0, 2)], 0.0)
    assert row == {"first": 1, "steps": 2, "began": 0.0, "seconds": 2.0, "read_bytes": 3.0, "loss": 1.0, "lr": 0.5}


def test_sent_bytes_and_collectives_are_counted_together(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, rank=0, world_size=2, background=False)
    writer.sent((1 << 53) - 1, 5)
    writer.end_step()
    writer.sent(7)
    writer.sent(8)
    writer.end_step()
    writer.close()
    table = read_run(tmp_path).last.first.table
    assert list(table["sent_bytes"]) == [(1 << 53) - 1, 15]
    assert list(table["collectives"]) == [1, 2]
    assert table["across_bytes"][0] == 5


def test_sums_are_exact_after_rows_were_merged(tmp_path: Path) -> None:
    steps = 4000
    write(tmp_path, steps, max_bytes=1, spans=2)
    record = read_run(tmp_path).last.first
    table = record.table
    assert len(table["first"]) < steps / 4
    assert table["steps"].sum() == steps
    assert table["sent_bytes"].sum() == sum(2 * (1000 + step) for step in range(steps))
    assert table["samples"].sum() == 8 * steps
    assert np.average(table["loss"], weights=table["steps"]) == pytest.approx((steps - 1) / 2, rel=1e-9)
    assert (table["loss_min"][0], table["loss_max"][-1]) == (0.0, steps - 1)
    assert table["lr"][-1] == pytest.approx(0.1 / steps)
    assert (np.diff(table["first"]) == table["steps"][:-1]).all()
    assert np.allclose(np.diff(table["began"]), table["seconds"][:-1], rtol=0, atol=1e-4)


def test_a_rank_stays_within_its_share_of_the_bound(tmp_path: Path) -> None:
    write(tmp_path, 4000, max_bytes=1, spans=8)
    files = list((tmp_path / "attempt-0000").iterdir())
    assert len(files) == 3
    assert sum(file.stat().st_size for file in files) <= 128 << 10


def test_old_steps_are_thinned_evenly_and_the_last_ones_all_stay(tmp_path: Path) -> None:
    write(tmp_path, 3000, max_bytes=1, spans=8)
    kept = read_run(tmp_path).last.first.steps
    assert kept[-RECENT_STEPS:] == list(range(3001 - RECENT_STEPS, 3001))
    old = kept[:-RECENT_STEPS]
    assert len(old) > 5
    assert old[0] < 300
    assert max(np.diff(old)) <= 64


def test_a_second_start_is_a_second_attempt_and_its_steps_count_as_replayed(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 0
    write(tmp_path, 30)
    assert next_attempt(tmp_path) == 1
    with_rank = RecordWriter(tmp_path, rank=0, world_size=1, attempt=1, first_step=21, background=False)
    for _ in range(15):
        with_rank.end_step(loss=0.0)
    with_rank.close()
    run = read_run(tmp_path)
    assert [attempt.number for attempt in run.attempts] == [0, 1]
    assert run.replayed == 10


def test_the_last_of_more_than_ten_thousand_starts_is_the_last_attempt(tmp_path: Path) -> None:
    for attempt in (9_999, 10_000):
        with_rank = RecordWriter(tmp_path, rank=0, world_size=1, attempt=attempt, background=False)
        with_rank.end_step(loss=0.0)
        with_rank.close()
    assert [attempt.number for attempt in read_run(tmp_path).attempts] == [9_999, 10_000]


def test_numbers_that_json_cannot_hold_are_missing_values(tmp_path: Path) -> None:
    with_rank = RecordWriter(tmp_path, rank=0, world_size=1, background=False)
    with_rank.end_step(loss=float("nan"), grad_norm=float("inf"), lr=0.5)
    with_rank.note("warning", text="x", value=float("nan"))
    with_rank.close()
    record = read_run(tmp_path).last.first
    assert np.isnan(record.table["loss"][0]) and np.isnan(record.table["grad_norm"][0])
    assert record.table["lr"][0] == 0.5


def test_merging_rows_leaves_missing_values_out() -> None:
    row = {name: 1.0 for name in COLUMN_NAMES if name != "loss"}
    merge_into(row, {name: 3.0 for name in COLUMN_NAMES if name != "lr"})
    assert (row["loss"], row["lr"], row["seconds"], row["grad_norm"], row["steps"]) == (3.0, 1.0, 4.0, 2.5, 4.0)
    assert (row["first"], row["loss_scale"], row["process_bytes"]) == (1.0, 3.0, 3.0)


def test_a_column_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, rank=0, world_size=1, background=False)
    with pytest.raises(ValueError, match="got los"):
        writer.end_step(los=1.0)
    with pytest.raises(ValueError, match="got 'grad_norm'"):
        writer.count("grad_norm", 1.0)
    writer.close()


def test_writing_imports_neither_numpy_nor_rich() -> None:
    code = (
        "import sys; from zero_report import RecordWriter, SpanKind; RecordWriter; "
        "print([m for m in ('numpy', 'rich', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
