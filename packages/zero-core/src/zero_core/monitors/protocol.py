"""What a monitor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Event = tuple[str, float, int]
"""A name such as ``Train/Samples/train_loss``, a value, and the number of samples seen so far."""


class Monitor(Protocol):
    """Takes the numbers of a run.

    Call order: any number of `write_events`, with sample numbers that do not decrease; then `close`.
    """

    @property
    def enabled(self) -> bool:
        """Whether events go anywhere."""

    def write_events(self, events: Sequence[Event]) -> None:
        """Write ``events``, all of them of one step."""

    def close(self) -> None:
        """Finish what was written."""


class NoMonitor:
    """Takes nothing: no monitor was asked for, or this is not rank 0."""

    enabled = False

    def write_events(self, events: Sequence[Event]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Monitors:
    """Several monitors as one."""

    enabled = True

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self._monitors = list(monitors)

    def write_events(self, events: Sequence[Event]) -> None:
        """Hand ``events`` to every monitor."""
        for monitor in self._monitors:
            monitor.write_events(events)

    def close(self) -> None:
        """Close every monitor."""
        for monitor in self._monitors:
            monitor.close()
