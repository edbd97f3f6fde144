"""Record the times at which each unit computes as spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zero_partition import Unit
from zero_report import RecordWriter, SpanKind


class UnitTimes:
    """Records a span per unit and pass: forward from its first module's begin to its last one's end, backward from
    the end of the previous unit to its own last gradient. ``after``: called after each span."""

    def __init__(self, writer: RecordWriter, after: Callable[[], None]) -> None:
        self._writer = writer
        self._after = after
        self._depth: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._backward_since = 0.0

    def forward(self) -> None:
        """Begin a forward pass: no unit's span is open."""
        self._depth.clear()

    def backward(self) -> None:
        """Begin a backward pass: the span of the unit that is computed first begins now."""
        self._backward_since = time.perf_counter()

    def enters(self, units: Sequence[Unit]) -> None:
        """Begin the spans of ``units``, as a module that computes with them is called. Spans of outer calls stay
        open."""
        for unit in units:
            depth = self._depth.get(unit.index, 0)
            self._depth[unit.index] = depth + 1
            if not depth:
                self._began[unit.index] = time.perf_counter()

    def leaves(self, units: Sequence[Unit]) -> None:
        """End the spans of ``units``, as a call of a module that computes with them is over. Spans of outer calls stay
        open."""
        for unit in units:
            depth = self._depth.get(unit.index, 0) - 1
            self._depth[unit.index] = max(0, depth)
            if depth == 0:
                self._writer.span(SpanKind.COMPUTE, unit.name, self._began[unit.index], time.perf_counter())
                self._after()

    def backward_done(self, unit: Unit) -> None:
        """Record the backward span of ``unit``, whose last gradient is computed; the next unit's span begins now."""
        now = time.perf_counter()
        self._writer.span(SpanKind.COMPUTE, unit.name, self._backward_since, now)
        self._after()
        self._backward_since = time.perf_counter()
