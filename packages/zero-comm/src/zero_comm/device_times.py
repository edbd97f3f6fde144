"""When collectives of accelerator tensors ran, measured by events of the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
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


class _Marks(NamedTuple):
    """Three events of one collective: in the stream of its launch, and in the stream that waits for it, before and
    after the wait.
    """

    tag: Tag
    launched: torch.Event
    needed: torch.Event
    complete: torch.Event


class DeviceTimes:
    """Measures collectives whose `wait` only orders streams, so that the host's clock says nothing about them.

    `completed` yields what the device has finished. The host never waits for the device. Clocks of the device and the
    host are compared whenever an event is seen to be complete: it was so at that moment at the latest.

    ``unmeasured``: collectives whose times are not known, because the device's events have none.
    """

    def __init__(self) -> None:
        self._marks: deque[_Marks] = deque()
        self._base: torch.Event | None = None
        self._base_time = 0.0
        self.unmeasured: list[Tag] = []

    def add(self, tag: Tag, launched: torch.Event, needed: torch.Event, complete: torch.Event) -> None:
        """Add a collective by its recorded events, which have times (``enable_timing``)."""
        self._marks.append(_Marks(tag, launched, needed, complete))

    def waiting(self, phases: Collection[str]) -> int:
        """Return how many collectives of ``phases`` `completed` has not yielded yet."""
        return sum(marks.tag.phase in phases for marks in self._marks)

    def completed(self) -> Iterator[DeviceTime]:
        """Yield the times of the collectives that the device has completed since the last call, in the order in which
        they were added; those behind one that is not complete come later.
        """
        while self._marks and self._marks[0].complete.query():
            tag, launched, needed, complete = self._marks.popleft()
            try:
                open_seconds, waited = _seconds_between(launched, complete), _seconds_between(needed, complete)
            except RuntimeError:  # a device whose events have no times
                self.unmeasured.append(tag)
                continue
            yield DeviceTime(tag, open_seconds, min(open_seconds, waited), self._host_time(complete))

    def _host_time(self, event: torch.Event) -> float:
        """Return the time of a completed event on the host's clock, as far as it is known."""
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


def timing_event(device: torch.device) -> torch.Event:
    """Return an event with times, recorded now in the current stream of ``device``."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _seconds_between(first: torch.Event, last: torch.Event) -> float:
    """Return the seconds between two completed events; 0 if ``last`` came first."""
    return max(0.0, first.elapsed_time(last) / 1e3)
