"""Writing a record: the calls of a rank while it trains. Standard library only, so that importing it costs little."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .block import SPAN_FIELDS, Memory, OpenBlock, StepBlock, UnderWay
from .files import Notes, Table, Timeline
from .rows import EndedStep
from .schema import (
    COLLECTIVES,
    COLUMNS,
    MAX_BYTES,
    OWNERS,
    SCHEMA_VERSION,
    SPANS_PER_STEP,
    SpanKind,
    attempt_folder,
    rank_file,
)

logger = logging.getLogger("zero_report")
_FLUSH_SECONDS = 0.5
_LEAST_BYTES = 128 << 10  # of one rank, even if the record becomes larger than its bound
_MOST_BYTES = 32 << 20  # of one rank
_ITEMS_PER_STEP = SPANS_PER_STEP * SPAN_FIELDS
_PHASES = {
    SpanKind.DATA: "data_s",
    SpanKind.FORWARD: "forward_s",
    SpanKind.BACKWARD: "backward_s",
    SpanKind.UPDATE: "update_s",
    SpanKind.SAVE: "save_s",
}
_GATHERS = (SpanKind.GATHER, SpanKind.PUBLISH, SpanKind.BROADCAST, SpanKind.EXCHANGE)
_WAITS = {
    **dict.fromkeys(COLLECTIVES, "control_wait_s"),
    **dict.fromkeys(_GATHERS, "gather_wait_s"),
    SpanKind.REDUCE: "reduce_wait_s",
    SpanKind.TIER_READ: "tier_wait_s",
    SpanKind.TIER_WRITE: "tier_wait_s",
}
_MOVED = {SpanKind.TIER_READ: "read_bytes", SpanKind.TIER_WRITE: "written_bytes"}
# Tuples by the number of a kind: a lookup by the kind itself computes its hash in Python, which is slower.
_PHASE_COLUMN, _WAIT_COLUMN, _MOVED_COLUMN = (
    tuple(found.get(kind) for kind in SpanKind) for found in (_PHASES, _WAITS, _MOVED)
)
_COLUMNS = frozenset(column.name for column in COLUMNS)
_SUMS = frozenset(column.name for column in COLUMNS if column.merge == "sum")
_WORK_COLUMNS = ("forward_s", "backward_s", "update_s")
"""Columns that are filled once a step computes. At the end of the record a step without them is not written: its spans
come from closing the engine."""
_SENT_COLUMNS = ("sent_bytes", "across_bytes", "collectives")


def next_attempt(path: str | os.PathLike[str]) -> int:
    """Return the number for a new attempt in the record at ``path``: 0, or one more than the last.

    Nothing is created. Let one rank call it and send the number to the others.
    """
    found = [int(folder.name[8:]) for folder in Path(path).glob("attempt-[0-9]*") if folder.name[8:].isdigit()]
    return max(found, default=-1) + 1


class RecordWriter:
    """Writes one rank's record in the folder ``path``; see `schema.py` for the format.

    ``attempt``: the number of this start of the run. ``facts``: plain data for the head (configuration, versions,
    machine). ``max_bytes``: of the whole record, all ranks together; a rank gets an equal share, at least 128 KiB and
    at most 32 MiB. ``first_step``: the number of the first step, which begins now. ``clock``: returns the time in
    seconds; all times that are passed in are its. ``under_way``: returns the spans that have begun and not ended, as
    (kind, name, begin, bytes); called on the writer's thread. ``background``: start that thread; without it, `flush`
    writes.

    `span`, `memory` and `end_step` may each be called by one thread only. The writer's own thread writes to the files
    every half second, also within a step; `note` writes at once. So a process that is killed loses at most the last
    half second. What cannot be written, as on a full disk, is kept and tried again with what follows; a warning of the
    logger `zero_report` says so once. The record is closed by `close`, or at the end of the process. Raises OSError if
    the files cannot be made. ``rank``, ``world_size``: this process's rank and the number of ranks in the run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        attempt: int = 0,
        facts: Mapping[str, Any] | None = None,
        max_bytes: int = MAX_BYTES,
        first_step: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        background: bool = True,
        under_way: Callable[[], UnderWay] = tuple,
    ) -> None:
        folder = Path(path) / attempt_folder(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        share = max(_LEAST_BYTES, min(_MOST_BYTES, max_bytes // world_size))
        self._table = Table(folder / rank_file(rank, "table"), share // 4)
        self._timeline = Timeline(folder / rank_file(rank, "timeline"), share // 2)
        self._notes = Notes(folder / rank_file(rank, "notes"), share // 4)
        self._clock = clock
        self._unix = time.time() - clock()
        self._process = os.getpid()
        self._lock = threading.Lock()  # of what is handed over; held for an instant
        self._file_lock = threading.Lock()  # held while files are written
        self._closed = self._has_warned = self._is_behind = False
        self._step, self._began = first_step, clock()
        self._under_way = under_way
        self._spans: list[Any] = []
        self._memory: Memory = None
        self._left_out = 0
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._finished: list[EndedStep] = []
        head = {"note": "head", "schema": SCHEMA_VERSION, "rank": rank, "world_size": world_size, "attempt": attempt}
        machine = {"host": socket.gethostname(), "pid": os.getpid(), "began": self._unix + clock()}
        self._notes.add({**head, **machine, "at": machine["began"], "facts": dict(facts or {})})
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._flush_loop, name="zero-report record", daemon=True)
        if background:
            self._thread.start()
        atexit.register(self.close)

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self._step

    def span(self, kind: SpanKind, name: str, begin: float, end: float, waited: float = 0.0, nbytes: int = 0) -> None:
        """Add a span to the current step, from ``begin`` to ``end`` on the writer's clock; in its last ``waited``
        seconds the rank only waited.

        ``name``: the unit, parameter or message that it is for; ``nbytes``: bytes that it moved. Also adds to the
        table's columns of phases, waits and bytes of tiers; `sent` counts the bytes of collectives. A step keeps
        `SPANS_PER_STEP` spans; more are only counted.
        """
        spans = self._spans
        if len(spans) < _ITEMS_PER_STEP:
            spans += (kind, name, begin, end, waited, nbytes)
        else:
            self._left_out += 1
        sums = self._sums
        column = _PHASE_COLUMN[kind]
        if column is not None:
            sums[column] = sums.get(column, 0.0) + end - begin
            return
        if waited and (column := _WAIT_COLUMN[kind]) is not None:
            sums[column] = sums.get(column, 0.0) + waited
        if nbytes and (column := _MOVED_COLUMN[kind]) is not None:
            sums[column] = sums.get(column, 0.0) + nbytes

    def sent(self, nbytes: int, across: int = 0) -> None:
        """Count one collective of the current step, in which this rank sends ``nbytes`` bytes, ``across`` of them to
        other nodes."""
        sums = self._sums
        sums["collectives"] = sums.get("collectives", 0) + 1
        sums["sent_bytes"] = sums.get("sent_bytes", 0) + nbytes
        if across:
            sums["across_bytes"] = sums.get("across_bytes", 0) + across

    def count(self, column: str, amount: float) -> None:
        """Add ``amount`` to a column of the current step's row.

        Raises ValueError unless it is a column of the table whose rows are merged by their sum.
        """
        sums = self._sums
        if column not in sums and column not in _SUMS:
            raise ValueError(f"count: expected a column of the table that is a sum, got {column!r}; see COLUMNS")
        sums[column] = sums.get(column, 0.0) + amount

    def memory(self, owners: Mapping[str, int], *, process: int | None = None, device: int | None = None) -> None:
        """Record the bytes of memory held now: ``owners``, bytes by owner (see `schema.OWNERS`), ``process``, resident
        in the process, and ``device``, allocated on the accelerator; None: not known.

        May be called several times a step; the step's row has the largest of each.
        """
        now = dict(owners)
        if self._memory is None:
            self._memory = []
        self._memory.append((self._clock(), now))
        peaks = {f"{owner}_bytes": now.get(owner, 0) for owner in OWNERS}
        if process is not None:
            peaks["process_bytes"] = process
        if device is not None:
            peaks["device_bytes"] = device
        for column, nbytes in peaks.items():
            self._peaks[column] = max(self._peaks.get(column, 0.0), nbytes)

    def end_step(self, **values: float | None) -> None:
        """End the current step and begin the next one now.

        ``values``: further columns of the ended step's row, none that `span`, `sent`, `count` or `memory` fill; None
        for a missing number. Raises ValueError, and ends nothing, for a name that is not a column of the table.
        """
        if not _COLUMNS.issuperset(values):
            unknown = sorted(values.keys() - _COLUMNS)
            raise ValueError(f"end_step: expected columns of the table, got {', '.join(unknown)}; see COLUMNS")
        if self._peaks:
            self._sums.update(self._peaks)
        step, began, now = self._step, self._began, self._clock()
        ended = step, began, now - began, self._spans, self._left_out, self._memory, self._sums, values
        self._lock.acquire()  # a `with` of a lock takes twice as long
        try:
            self._finished.append(ended)
            self._step, self._began = step + 1, now
            self._clear_step()
        finally:
            self._lock.release()

    def restart(self, step: int) -> None:
        """Begin step ``step`` now and drop everything since the last step's end, except the counts of `sent`, which
        move to it."""
        with self._lock:
            self._step, self._began = step, self._clock()
            sent = {name: amount for name, amount in self._sums.items() if name in _SENT_COLUMNS}
            self._clear_step()
            self._sums = sent

    def note(self, kind: str, **facts: Any) -> None:
        """Write an event of this kind (a warning, a checkpoint, a retry) to the file now, with time and current step;
        on any thread.

        ``facts``: plain data. Does nothing once the record is closed; a file that is full only counts the event.
        """
        note = {"note": kind, "at": self._unix + self._clock(), "step": self._step, **facts}
        with self._file_lock:
            if not self._closed:
                self._try_to_write(lambda: self._notes.add(note))

    def flush(self) -> None:
        """Write everything that is not in the files yet, including the current step so far; does nothing once the
        record is closed. Any thread may call it.
        """
        with self._file_lock:
            if not self._closed:
                self._write_handed_over(self._under_way())
                self._try_to_write(self._notes.flush)

    def close(self) -> None:
        """Write the rest, mark the record as closed and close its files. Does nothing the second time or in a forked
        process.

        Waits for the writer's thread to end. The current step is written only if it has computed. A warning says what
        cannot be written.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._file_lock:
            if self._closed:  # another thread has been faster
                return
            self._closed, self._has_warned = True, False  # what is missing now stays so
            self._write_handed_over((), closing=True)
            last = {"note": "closed", "at": self._unix + self._clock(), "step": self._step}
            self._try_to_write(lambda: self._notes.finish(last))
            for file in (self._table, self._timeline, self._notes):
                self._try_to_write(file.close)
        atexit.unregister(self.close)

    def _clear_step(self) -> None:
        """Replace the spans, sums and memory collected so far by empty ones, for a new step. The caller holds
        `_lock`."""
        self._spans, self._left_out, self._sums, self._memory = [], 0, {}, None
        if self._peaks:
            self._peaks = {}

    def _write_handed_over(self, running: UnderWay, *, closing: bool = False) -> None:
        """Write the steps that have ended since the last call, and the current step with the spans ``running`` under
        way, if it has any spans.

        When ``closing``, the current step is written only if it has spans of computing. The caller holds `_file_lock`;
        this takes `_lock` for a moment.
        """
        with self._lock:
            finished, self._finished = self._finished, []
            under_way = None
            begun = not self._sums.keys().isdisjoint(_WORK_COLUMNS)
            if begun if closing else self._spans or running:
                spans, memory = list(self._spans), list(self._memory or ())
                block = StepBlock(self._step, self._began, self._clock() - self._began, spans, self._left_out, memory)
                under_way = OpenBlock(block, running)
        if finished or under_way is not None or self._is_behind:
            self._is_behind = False
            self._table.add(finished, self._unix)
            places = self._timeline.indices_to_keep(finished[0][0], len(finished)) if finished else []
            kept = [StepBlock(*finished[place][:-2]) for place in places]
            lines = [(block.step, block.encode(self._unix)) for block in kept if block.spans or block.memory]
            line = b"" if under_way is None else under_way.encode(self._unix)
            self._try_to_write(lambda: self._timeline.append(lines, line))
            self._try_to_write(self._table.flush)

    def _try_to_write(self, write: Callable[[], object]) -> None:
        """Call ``write``, and log a warning for the first OSError of all calls instead of raising it, so that a record
        does not end the training. What ``write`` could not write it keeps for its next call."""
        try:
            write()
        except OSError as error:
            self._is_behind = True
            if not self._has_warned:
                self._has_warned = True
                end = "is incomplete" if self._closed else "cannot be written now; what is missing is kept for later"
                logger.warning("the record %s %s: %s", self._folder, end, error)

    def _flush_loop(self) -> None:
        """Write to the files every half second until `close`; runs on the writer's thread."""
        while not self._wake.wait(_FLUSH_SECONDS):
            self.flush()
