"""Readers of shards, masters and states beside training, such as a checkpoint that is copied behind it."""

from __future__ import annotations

from collections.abc import Callable


class Readers:
    """Waited for before anything writes shards, masters or states outside of forward and backward."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def add(self, wait: Callable[[], None]) -> None:
        """``wait`` returns when a reader is done, at once when it is idle. It must not raise."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when all readers are done: now memory may change."""
        for wait in self._waits:
            wait()
