"""When collectives of accelerator tensors ran, measured by events of the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from .tag import Tag

_REBASE_AFTER = 600.0  # seconds; the distance of two events has few digits, so it must not become long


class DeviceTime(NamedTuple):
    """The times of one collective that an accelerator has completed. ``open_seconds``: from the moment at which the
    device came to its launch until its result was in place. ``waited_seconds``: the part of it in which the stream that
    needed the result stood still. ``ended``: when it was in place, by `time.perf_counter`; it may be a little later
    than in truth, never earlier.
    """

    tag: Tag
    open_seconds: float
    waited_seconds: float
    ended: float


class DeviceMarks:
    """Marks one collective of tensors on ``device`` by events, since its `wait` only orders streams. Make it where the
    collective is launched.

    ``timed``: three events with times are recorded: at the launch, at `begin_wait` and at `complete`. Without it there
    is `complete` alone, if it is asked for.
    """

    def __init__(self, device: torch.device, *, timed: bool) -> None:
        self.timed = timed
        self._device = device
        self._launched = self._record_event() if timed else None
        self._needed: torch.Event | None = None

    def begin_wait(self) -> None:
        """Record an event in the current stream, which needs the result from here on; do nothing if the marks are not
        timed."""
        self._needed = self._record_event() if self.timed else None

    @cached_property
    def complete(self) -> torch.Event:
        """The event that completes with the result, recorded in the current stream when it is first asked for: ask
        after the wait.
        """
        return self._record_event()

    def seconds(self) -> tuple[float, float]:
        """Return (seconds from the launch to completion, seconds from `begin_wait` to completion). Only for timed
        marks, once the event `complete` has completed. Raises RuntimeError on a device whose events have no times."""
        return _seconds_between(self._launched, self.complete), _seconds_between(self._needed, self.complete)

    def _record_event(self) -> torch.Event:
        """Return an event recorded now in the current stream."""
        event = torch.Event(self._device, enable_timing=self.timed)
        event.record()
        return event


class DeviceTimes:
    """Measures collectives whose `wait` only orders streams, so that the host's clock says nothing about them.

    `completed` yields what the device has finished. The host never waits for the device. Clocks of the device and the
    host are compared whenever an event is seen to be complete: it was complete at that moment at the latest.

    Attributes:
        unmeasured: collectives whose times are not known, because the device's events have none; the reader empties it.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[Tag, DeviceMarks, torch.Event]] = deque()
        self._base: torch.Event | None = None
        self._base_time = 0.0
        self.unmeasured: list[Tag] = []

    def add(self, tag: Tag, marks: DeviceMarks) -> None:
        """Add the collective ``tag``, which was waited for, to those that `completed` will yield. ``marks``: timed."""
        self._running.append((tag, marks, marks.complete))

    def waiting(self, phases: Collection[str]) -> int:
        """Return how many of the added collectives of ``phases`` `completed` has not looked at yet: the device was not
        seen to complete them."""
        return sum(tag.phase in phases for tag, *_ in self._running)

    def completed(self) -> Iterator[DeviceTime]:
        """Yield the times of the collectives that the device has completed since the last call, in the order in which
        they were added; those behind one that is not complete come later.
        """
        while self._running and self._running[0][2].query():
            tag, marks, complete = self._running.popleft()
            try:
                open_seconds, waited = marks.seconds()
            except RuntimeError:  # a device whose events have no times
                self.unmeasured.append(tag)
                continue
            yield DeviceTime(tag, open_seconds, min(open_seconds, waited), self._host_time(complete))

    def _host_time(self, event: torch.Event) -> float:
        """Return the host's time (`time.perf_counter`) at which ``event``, which is complete, became so: never earlier
        than in truth, and a little later at most. Call it as soon as the completion is seen."""
        now = time.perf_counter()
        if self._base is None:
            self._base, self._base_time = event, now
            return now
        since = _seconds_between(self._base, event)
        self._base_time = min(self._base_time, now - since)
        ended = self._base_time + since
        if since > _REBASE_AFTER:
            self._base, self._base_time = event, ended
        return ended


def _seconds_between(first: torch.Event | None, last: torch.Event) -> float:
    """Return the seconds between two completed events; 0 if ``last`` came first, or there is no ``first``."""
    return 0.0 if first is None else max(0.0, first.elapsed_time(last) / 1e3)
