"""A trace of transfers: what moved when, and how much of it overlapped with compute. A hop is one kind of transfer
("states in", "shards, device") or of compute. The sink is a function of the user's that gets every event as it is
recorded.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

__all__ = ["HopReport", "Trace"]

Sink = Callable[[str, str, float, float, int, bool], object]
"""Takes hop, name, begin and end (seconds of the trace's clock), bytes, and whether it was a wait for a transfer."""


@dataclass(frozen=True)
class HopReport:
    """One kind of transfer: ``nbytes`` moved, ``busy_s`` seconds with at least one under way, ``waited_s`` seconds
    spent waiting for them.
    """

    hop: str
    nbytes: int
    busy_s: float
    waited_s: float

    @property
    def bandwidth(self) -> float:
        """Return the bytes per second of the busy time; 0 if there was none."""
        return self.nbytes / self.busy_s if self.busy_s else 0.0

    @property
    def hidden(self) -> float:
        """Return the fraction of the busy time that was not waited for, from 0 to 1; 1 if there was no busy time."""
        return max(0.0, 1.0 - self.waited_s / self.busy_s) if self.busy_s else 1.0


@dataclass(frozen=True)
class _Event:
    """One transfer, wait or computation of a hop; times in seconds of the trace's clock. ``waiting``: the time was
    spent waiting for a transfer of this hop. ``failure``: the error of a transfer that failed, as text, else None.
    """

    hop: str
    name: str
    begin: float
    end: float
    nbytes: int
    waiting: bool
    failure: str | None = None


class _Transfer(NamedTuple):
    """A transfer under way, with the arguments of `Trace.follow`; ``begin`` in seconds of the trace's clock."""

    hop: str
    name: str
    begin: float
    nbytes: int
    wait: Callable[[], object]


_Transfers: TypeAlias = "queue.SimpleQueue[_Transfer | None]"


class Trace:
    """Records transfers, waits and kernels; `report` sums them up, `save` writes a file that opens in Perfetto.

    Pass one to the stores and the optimizers to be traced. ``rank`` is the process number in the file. It records until
    `stop`; events are kept until `clear`. A thread records when asynchronous transfers end; `close` ends it.
    Thread-safe. ``sink`` is called with every event, from any thread, also after `stop`; with ``keep`` false events go
    to the sink only. An error of the sink in the recording thread is raised by the next call that waits for transfers.
    ``clock`` returns seconds.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        sink: Sink | None = None,
        keep: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._sink = sink
        self._events: list[_Event] = []
        self._lock = threading.Lock()
        self._running: _Transfers = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._open = 0
        self._sink_failure: BaseException | None = None
        self._recording = keep
        self._idle = threading.Condition(self._lock)

    @contextmanager
    def span(self, hop: str, name: str, nbytes: int = 0, *, waiting: bool = False) -> Iterator[None]:
        """Return a context manager that records the time inside its block as an event called ``name`` of ``nbytes``,
        also if the block raises; ``waiting``: the time is spent waiting for a transfer of this hop.
        """
        begin = self._clock()
        try:
            yield
        finally:
            self._add(_Event(hop, name, begin, self._clock(), nbytes, waiting))

    def follow(self, hop: str, name: str, nbytes: int, wait: Callable[[], object]) -> None:
        """Record a transfer of ``nbytes`` that has just begun and ends when ``wait``, called in another thread, returns
        or raises (then it counts 0 bytes). Transfers are waited for in the order of the calls. Do nothing if events are
        not kept and there is no sink.
        """
        with self._lock:
            if not self._recording and self._sink is None:
                return
            if self._watcher is None:
                running: _Transfers = queue.SimpleQueue()
                watcher = threading.Thread(
                    target=self._record_ends, args=(running,), name="zero-offload trace", daemon=True
                )
                watcher.start()
                self._watcher, self._running = watcher, running
            self._open += 1
            self._running.put(_Transfer(hop, name, self._clock(), nbytes, wait))

    def report(self) -> list[HopReport]:
        """Wait for the transfers under way; return one row for each hop that was recorded, sorted by name."""
        events = self._finished_events()
        rows = []
        for hop in sorted({event.hop for event in events}):
            own = [event for event in events if event.hop == hop]
            moves = [event for event in own if not event.waiting]
            rows.append(
                HopReport(
                    hop,
                    sum(event.nbytes for event in moves),
                    _union_length([(event.begin, event.end) for event in moves]),
                    _union_length([(event.begin, event.end) for event in own if event.waiting]),
                )
            )
        return rows

    def table(self) -> str:
        """Wait for the transfers under way; return text with one line for each hop, below a header: bytes, GB/s while
        busy, busy seconds, waited seconds, and the fraction of the busy time that was not waited for.
        """
        lines = [f"{'hop':<22}{'bytes':>16}{'GB/s':>9}{'busy s':>10}{'waited s':>10}{'hidden':>8}"]
        for row in self.report():
            lines.append(
                f"{row.hop:<22}{row.nbytes:>16}{row.bandwidth / 1e9:>9.2f}{row.busy_s:>10.3f}{row.waited_s:>10.3f}"
                f"{row.hidden:>8.0%}"
            )
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Wait for the transfers under way; write all events to the file ``path``, as JSON in the trace event format,
        which ui.perfetto.dev and chrome://tracing open.

        Each hop is a row of its own, with further rows below it where its transfers overlap.
        """
        rows: list[dict[str, object]] = []
        tracks: dict[str, int] = {}
        for track, event in _events_by_row(self._finished_events()):
            number = tracks.setdefault(track, len(tracks) + 1)
            rows.append(
                {
                    "name": event.name,
                    "cat": event.hop,
                    "ph": "X",
                    "ts": event.begin * 1e6,
                    "dur": (event.end - event.begin) * 1e6,
                    "pid": self._rank,
                    "tid": number,
                    "args": {"bytes": event.nbytes} | ({"failed": event.failure} if event.failure else {}),
                }
            )
        names: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        names.append(
            {"name": "process_name", "ph": "M", "pid": self._rank, "tid": 0, "args": {"name": f"rank {self._rank}"}}
        )
        Path(path).write_text(json.dumps({"traceEvents": names + rows, "displayTimeUnit": "ms"}))

    def clear(self) -> None:
        """Wait for the transfers under way and forget all events."""
        self._finished_events()
        with self._lock:
            self._events.clear()

    def stop(self) -> None:
        """Stop keeping events; those kept stay, and ``sink`` is still called."""
        with self._lock:
            self._recording = False

    def close(self) -> None:
        """Wait for the transfers under way and end the thread that follows them; `follow` starts it again. Recorded
        events stay.
        """
        try:
            self._finished_events()
        finally:
            with self._lock:
                watcher, self._watcher = self._watcher, None
                self._running.put(None)
            if watcher is not None:
                watcher.join()

    def _add(self, event: _Event) -> None:
        """Keep an event unless recording was stopped; call the sink with it, on this thread, and raise its error."""
        with self._lock:
            if self._recording:
                self._events.append(event)
        if self._sink is not None:
            self._sink(event.hop, event.name, event.begin, event.end, event.nbytes, event.waiting)

    def _finished_events(self) -> list[_Event]:
        """Wait for the transfers under way; return all events kept, sorted by their begin. If the sink has raised an
        error in the recording thread since the last call, raise that instead.
        """
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)
            failure, self._sink_failure = self._sink_failure, None
            if failure is not None:
                raise failure
            return sorted(self._events, key=lambda event: event.begin)

    def _record_ends(self, running: _Transfers) -> None:
        """Wait for each transfer that comes through ``running`` in turn and record its end, until None comes; the body
        of the recording thread. No error ends it: that of a transfer is recorded in the event, that of the sink is
        raised by the next `_finished_events`.
        """
        while (transfer := running.get()) is not None:
            hop, name, begin, nbytes, wait = transfer
            failure: str | None = None
            try:
                wait()
            except BaseException as error:  # the user of the data meets it too
                nbytes, failure = 0, f"{type(error).__name__}: {error}"
            try:
                self._add(_Event(hop, name, begin, self._clock(), nbytes, False, failure))
            except BaseException as error:
                self._sink_failure = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def _union_length(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of the (begin, end) intervals, in their own unit."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(intervals):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _events_by_row(events: list[_Event]) -> Iterator[tuple[str, _Event]]:
    """Yield (row name, event) for each of ``events``, which are sorted by their begin: in the drawing each hop has one
    row, and further ones where its events overlap.
    """
    ends: dict[str, list[float]] = {}
    for event in events:
        group = f"{event.hop}, waiting" if event.waiting else event.hop
        own = ends.setdefault(group, [])
        free = next((number for number, end in enumerate(own) if end <= event.begin), len(own))
        own[free : free + 1] = [event.end]
        yield (group if free == 0 else f"{group} {free + 1}"), event
