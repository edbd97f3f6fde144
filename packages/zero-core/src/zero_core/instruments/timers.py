"""Times of the parts of a step: by the clock on the CPU, by events on an accelerator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NOTHING = nullcontext()


class Timers:
    """Adds up how long named parts take on ``device``.

    On an accelerator each part lies between two events of the current stream; only `take` waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Time the block as ``part``; parts may hold other parts."""
        if self._on_host:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start
            return
        first, last = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        first.record()
        try:
            yield
        finally:
            last.record()
            self._events.append((part, first, last))

    def take(self) -> dict[str, float]:
        """Milliseconds of each part since the last time, which starts anew."""
        for part, first, last in self._events:
            last.synchronize()
            self._seconds[part] = self._seconds.get(part, 0.0) + first.elapsed_time(last) / 1e3
        self._events.clear()
        taken = {part: seconds * 1e3 for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class NoTimers:
    """Times nothing."""

    def during(self, part: str) -> AbstractContextManager[None]:
        """Nothing to do."""
        return _NOTHING

    def take(self) -> dict[str, float]:
        """No times."""
        return {}
