"""Writing the steps of all ranks as one trace in the trace event format, for ui.perfetto.dev."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record.parsing import Span
from .record.reader import Attempt, read_run
from .record.schema import COLLECTIVES, TIERS, SpanKind

_TRACKS = ("passes", "collectives", "tiers", "units")


def write_perfetto(record: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Write a trace of the last attempt to ``path``, replacing the file, and return the number of its spans.

    It has the steps whose spans all ranks kept, one process per rank. A span that was partly waited in is two events.
    Raises `RecordError` if there is no record, OSError if the file cannot be written.
    """
    run = read_run(Path(record))
    count = 0
    with Path(path).open("w", encoding="utf-8", errors="replace") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _trace_events(run.last):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
            count += event["ph"] == "X" and not _is_waiting_track(event["tid"])
        file.write("\n]}\n")
    return count


def _trace_events(attempt: Attempt) -> Iterator[dict[str, Any]]:
    """Yield the trace events of an attempt: per rank the names of processes and threads, then the spans of all
    steps."""
    for rank in attempt.ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for number, track in enumerate(_TRACKS):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": 2 * number, "args": {"name": track}}
            waiting = f"{track}, waiting"
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": 2 * number + 1, "args": {"name": waiting}}
    for step in attempt.steps():
        for rank, record in attempt.ranks.items():
            block = record.block(step)
            for span in () if block is None else block.spans:
                assert block is not None
                yield from _span_events(span, rank, step, block.began * 1e6)


def _is_waiting_track(number: int) -> bool:
    """Return whether the track of this number has only the waited parts of spans."""
    return number % 2 == 1


def _span_events(span: Span, rank: int, step: int, origin: float) -> Iterator[dict[str, Any]]:
    """Yield the trace event of a span, and one for the part of it that was waited, if any.

    ``origin``: Unix microseconds at which the rank's step began.
    """
    track = 2 * (
        1 if span.kind in COLLECTIVES else 2 if span.kind in TIERS else 3 if span.kind == SpanKind.COMPUTE else 0
    )
    kind = SpanKind(span.kind).name.lower()
    name = kind if span.name in (kind, "") else f"{kind}: {span.name}"
    args = {"step": step, "bytes": span.nbytes, "waited_us": span.waited}
    event = {"ph": "X", "name": name, "cat": kind, "pid": rank, "args": args}
    yield {**event, "tid": track, "ts": origin + span.begin, "dur": span.duration}
    if span.waited:
        yield {**event, "tid": track + 1, "ts": origin + span.end - span.waited, "dur": span.waited}
