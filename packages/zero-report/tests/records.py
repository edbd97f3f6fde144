"""Helpers of the tests of records: writing a short one, and making all that can be made of one."""

from __future__ import annotations

import time
from pathlib import Path

from zero_report import RecordWriter, Run, SpanKind, read_run, write_report
from zero_report.perfetto import write_perfetto


def write(
    path: Path, steps: int, *, max_bytes: int = 1 << 30, spans: int = 3, rank: int = 0, world_size: int = 1
) -> None:
    with_rank = RecordWriter(path, rank=rank, world_size=world_size, max_bytes=max_bytes, background=False)
    for step in range(steps):
        now = time.perf_counter()
        for number in range(spans):
            with_rank.span(SpanKind.GATHER, f"layers.{number}", now, now + 0.001, 0.0005, 1000 + step)
            with_rank.count("sent_bytes", 1000 + step)
        with_rank.end_step(loss=float(step), loss_min=float(step), loss_max=float(step), lr=0.1 / (step + 1), samples=8)
        if step % 50 == 0:
            with_rank.flush()
    with_rank.close()


def paged(path: Path) -> Run:
    """The record, after everything that is made of one was made of it."""
    run = read_run(path)
    write_report(path, path / "page.html")
    write_perfetto(path, path / "trace.json")
    for attempt in run.attempts:
        for record in attempt.ranks.values():
            record.last_written_at()
    return run
