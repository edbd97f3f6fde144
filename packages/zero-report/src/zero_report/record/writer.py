"""The writer's side: what a rank calls while it trains. Standard library only, so that importing it costs nothing."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .files import Notes, Row, Table, Timeline
from .schema import (
    COLLECTIVES,
    COLUMNS,
    MAX_BYTES,
    OWNERS,
    SCHEMA_VERSION,
    SPANS_PER_STEP,
    Kind,
    attempt_folder,
    rank_file,
)

_FLUSH_SECONDS = 0.5
_LEAST_BYTES = 128 << 10  # of one rank, whatever the bound
_MOST_BYTES = 32 << 20
_NAMED = {Kind.GATHER: "gather", Kind.PUBLISH: "gather", Kind.BROADCAST: "gather", Kind.REDUCE: "reduce"}
_PHASE_COLUMNS = {
    Kind.DATA: "data_s",
    Kind.FORWARD: "forward_s",
    Kind.BACKWARD: "backward_s",
    Kind.UPDATE: "update_s",
    Kind.SAVE: "save_s",
}
_WAIT_COLUMNS = {
    **{kind: f"{_NAMED.get(kind, 'control')}_wait_s" for kind in COLLECTIVES},
    Kind.TIER_READ: "tier_wait_s",
    Kind.TIER_WRITE: "tier_wait_s",
}
_BYTE_COLUMNS = {
    Kind.TIER_READ: "read_bytes",
    Kind.TIER_WRITE: "written_bytes",
}
_COLUMNS = frozenset(column.name for column in COLUMNS)
_SUMS = frozenset(column.name for column in COLUMNS if column.merge == "sum")
_SENT = ("sent_bytes", "across_bytes", "collectives")
_Span = tuple[int, str, float, float, float, int]


def next_attempt(path: str | os.PathLike[str]) -> int:
    """Return the number of a new attempt in the record at ``path``; one rank asks, and tells the others."""
    found = [int(folder.name[8:]) for folder in Path(path).glob("attempt-[0-9]*") if folder.name[8:].isdigit()]
    return max(found, default=-1) + 1


class RecordWriter:
    """Writes one rank's record in the folder ``path``; see `schema.py` for what is in it.

    ``facts``: plain data for the head (configuration, versions, machine). ``max_bytes``: of the whole record, all ranks
    together; a rank takes its share of it, at least 128 KiB and at most 32 MiB. Times are those of ``clock``, in
    seconds. `span`, `memory` and `end_step` are called by one thread each; a thread of the
    writer's own puts them into the files every half second, also while a step lasts. `note` is written at once.

    What was handed over half a second before the process is killed is in the files.
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
    ) -> None:
        folder = Path(path) / attempt_folder(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        share = max(_LEAST_BYTES, min(_MOST_BYTES, max_bytes // world_size))
        self._table = Table(folder / rank_file(rank, "table"), share // 4)
        self._timeline = Timeline(folder / rank_file(rank, "timeline"), share // 2)
        self._notes = Notes(folder / rank_file(rank, "notes"), share // 4)
        self._clock = clock
        self._unix = time.time() - clock()
        self._process = os.getpid()
        self._lock = threading.Lock()  # of what is handed over; held for an instant
        self._files = threading.Lock()  # held while files are written
        self._closed = False
        self._step, self._began = first_step, clock()
        self._spans: list[_Span] = []
        self._memory: list[tuple[float, dict[str, int]]] = []
        self._left_out = 0
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._finished: list[tuple[dict[str, Any], Row]] = []
        head = {"note": "head", "schema": SCHEMA_VERSION, "rank": rank, "world_size": world_size, "attempt": attempt}
        machine = {"host": socket.gethostname(), "pid": os.getpid(), "began": self._unix + clock()}
        self._notes.add({**head, **machine, "at": machine["began"], "facts": dict(facts or {})})
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="zero-report record", daemon=True)
        if background:
            self._thread.start()
        atexit.register(self.close)

    @property
    def step(self) -> int:
        """The number of the step that is under way."""
        return self._step

    def span(self, kind: Kind, name: str, begin: float, end: float, waited: float = 0.0, nbytes: int = 0) -> None:
        """Add that something lasted from ``begin`` to ``end``; in its last ``waited`` seconds the rank only waited.

        Phases, waits, and bytes of tiers add up in the table; bytes of collectives are counted where they are sent.
        """
        if len(self._spans) < SPANS_PER_STEP:
            self._spans.append((kind, name, begin, end, waited, nbytes))
        else:
            self._left_out += 1
        sums = self._sums
        if waited:
            column = _WAIT_COLUMNS[kind]
            sums[column] = sums.get(column, 0.0) + waited
        if nbytes and kind in _BYTE_COLUMNS:
            column = _BYTE_COLUMNS[kind]
            sums[column] = sums.get(column, 0.0) + nbytes
        if kind in _PHASE_COLUMNS:
            column = _PHASE_COLUMNS[kind]
            sums[column] = sums.get(column, 0.0) + end - begin

    def count(self, column: str, amount: float) -> None:
        """Add ``amount`` to a column of the step under way that is a sum. Raises ValueError where there is no such."""
        if column not in self._sums and column not in _SUMS:
            raise ValueError(f"count: expected a column of the table that is a sum, got {column!r}; see COLUMNS")
        self._sums[column] = self._sums.get(column, 0.0) + amount

    def memory(self, owners: Mapping[str, int], *, process: int | None = None, device: int | None = None) -> None:
        """Add what is held now: bytes by owner (see `schema.OWNERS`), of the process, and of the accelerator."""
        now = dict(owners)
        self._memory.append((self._clock(), now))
        peaks = {f"{owner}_bytes": now.get(owner, 0) for owner in OWNERS}
        if process is not None:
            peaks["process_bytes"] = process
        if device is not None:
            peaks["device_bytes"] = device
        for column, nbytes in peaks.items():
            self._peaks[column] = max(self._peaks.get(column, 0.0), nbytes)

    def end_step(self, **values: float | None) -> None:
        """End the step under way; ``values``: what this step's row holds besides times, waits, bytes and memory.

        The next step begins now. Raises ValueError where a name is no column of the table.
        """
        if not values.keys() <= _COLUMNS:
            unknown = sorted(values.keys() - _COLUMNS)
            raise ValueError(f"end_step: expected columns of the table, got {', '.join(unknown)}; see COLUMNS")
        now = self._clock()
        row = self._sums
        row |= self._peaks
        for name, value in values.items():
            if value is not None:
                row[name] = value
        row["first"], row["steps"] = self._step, 1
        row["began"], row["seconds"] = self._unix + self._began, now - self._began
        block = self._block(now, self._spans, self._memory)
        with self._lock:
            self._finished.append((block, row))
            self._step, self._began = self._step + 1, now
            self._spans, self._memory, self._left_out = [], [], 0
            self._sums, self._peaks = {}, {}

    def restart(self, step: int) -> None:
        """Begin ``step`` now: what came before belongs to no step, but for what was sent."""
        with self._lock:
            self._step, self._began = step, self._clock()
            self._spans, self._memory, self._left_out = [], [], 0
            self._sums = {name: amount for name, amount in self._sums.items() if name in _SENT}
            self._peaks = {}

    def note(self, kind: str, **facts: Any) -> None:
        """Write an event now: a warning, a checkpoint, a retry; ``facts`` is plain data."""
        with self._files:
            if not self._closed:
                self._notes.add({"note": kind, "at": self._unix + self._clock(), "step": self._step, **facts})

    def flush(self) -> None:
        """Write everything that was handed over."""
        with self._files:
            if not self._closed:
                self._write()

    def close(self) -> None:
        """Write the rest and end the record."""
        if self._closed or os.getpid() != self._process:
            return
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._files:
            self._write()
            self._closed = True
            self._table.close()
            self._timeline.close()
            self._notes.close({"note": "closed", "at": self._unix + self._clock(), "step": self._step})
        atexit.unregister(self.close)

    def _write(self) -> None:
        with self._lock:
            finished, self._finished = self._finished, []
            under_way = None
            if self._spans:
                under_way = self._block(self._clock(), list(self._spans), list(self._memory))
                under_way["open"] = True
        if finished or under_way is not None:
            for _, row in finished:
                self._table.add(row)
            blocks = [block for block, _ in finished if block["spans"] or block["memory"]]
            kept = [_packed(block) for block in self._timeline.kept(blocks)]
            self._timeline.append(kept, None if under_way is None else _packed(under_way))
            self._table.flush()

    def _block(self, end: float, spans: list[_Span], memory: list[tuple[float, dict[str, int]]]) -> dict[str, Any]:
        return {
            "step": self._step,
            "began": self._began,
            "unix": self._unix,
            "us": end - self._began,
            "spans": spans,
            "left_out": self._left_out,
            "memory": memory,
        }

    def _work(self) -> None:
        while not self._wake.wait(_FLUSH_SECONDS):
            self.flush()


def _packed(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block as it is written: microseconds from its begin, names once."""
    began = block["began"]
    names: dict[str, int] = {}
    spans: list[int] = []
    for kind, name, begin, end, waited, nbytes in block["spans"]:
        number = names.setdefault(name, len(names))
        spans += (
            int(kind),
            number,
            round((begin - began) * 1e6),
            round((end - begin) * 1e6),
            round(waited * 1e6),
            int(nbytes),
        )
    packed = {
        "step": block["step"],
        "began": round(block["unix"] + began, 6),
        "us": round(block["us"] * 1e6),
        "names": list(names),
        "spans": spans,
        "left_out": block["left_out"],
        "memory": [[round((at - began) * 1e6), owners] for at, owners in block["memory"]],
    }
    return {**packed, "open": True} if block.get("open") else packed
