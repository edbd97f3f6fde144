"""Record the times at which each unit computes, as spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zero_partition import Unit
from zero_report import RecordWriter, SpanKind


class UnitTimes:
    """Writes a span for each unit and pass: forward from the unit's first module to its last, backward from the end of
    the unit before it to its own last gradient. ``after``: called at the end of each."""

    def __init__(self, writer: RecordWriter, after: Callable[[], None]) -> None:
        self._writer = writer
        self._after = after
        self._depth: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._backward_since = 0.0

    def forward(self) -> None:
        """A forward pass begins."""
        self._depth.clear()

    def backward(self) -> None:
        """A backward pass begins."""
        self._backward_since = time.perf_counter()

    def enters(self, units: Sequence[Unit]) -> None:
        """A module that uses ``units`` begins to compute, in forward."""
        for unit in units:
            depth = self._depth.get(unit.index, 0)
            self._depth[unit.index] = depth + 1
            if not depth:
                self._began[unit.index] = time.perf_counter()

    def leaves(self, units: Sequence[Unit]) -> None:
        """A module that uses ``units`` has computed."""
        for unit in units:
            depth = self._depth.get(unit.index, 0) - 1
            self._depth[unit.index] = max(0, depth)
            if depth == 0:
                self._writer.span(SpanKind.COMPUTE, unit.name, self._began[unit.index], time.perf_counter())
                self._after()

    def backward_done(self, unit: Unit) -> None:
        """Autograd has finished the last parameter of ``unit``."""
        now = time.perf_counter()
        self._writer.span(SpanKind.COMPUTE, unit.name, self._backward_since, now)
        self._after()
        self._backward_since = time.perf_counter()
