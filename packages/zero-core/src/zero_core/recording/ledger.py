"""Record collectives as spans."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from zero_comm import Ledger, Tag
from zero_report import RecordWriter, SpanKind

Running = list[tuple[SpanKind, str, float, int]]
"""Spans that have begun and not ended: kind, name, begin (`time.perf_counter`) and bytes."""
_PENDING = 64  # messages of one name whose end is awaited


class RecordedLedger(Ledger):
    """A ledger that also records each collective as a span when it ends, and passes counts on to ``inner``."""

    def __init__(self, inner: Ledger, writer: RecordWriter) -> None:
        super().__init__()
        self.times_devices = True
        self._inner = None if type(inner) is Ledger else inner
        self._writer = writer
        self._kinds: Mapping[str, SpanKind] = {kind.name.lower(): kind for kind in SpanKind}
        self._pending: dict[tuple[str, str], deque[tuple[float, int]]] = {}

    def under_way(self) -> Running:
        """Return the collectives that run now, as spans. Any thread may call it."""
        return [
            (self._kinds[phase], name, begin, nbytes)
            for (phase, name), pending in self._pending.copy().items()
            for begin, nbytes in pending.copy()
        ]

    def count(self, tag: Tag, sent_bytes: int, across_bytes: int = 0) -> None:
        """Count a collective that begins, which sends ``sent_bytes`` from this rank, ``across_bytes`` to other
        nodes."""
        super().count(tag, sent_bytes, across_bytes)
        if self._inner is not None:
            self._inner.count(tag, sent_bytes, across_bytes)
        self._writer.sent(sent_bytes, across_bytes)
        key = (tag.phase, tag.name)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = deque(maxlen=_PENDING)
        pending.append((time.perf_counter(), sent_bytes))

    def count_seconds(self, tag: Tag, open_seconds: float, waited_seconds: float, ended: float | None = None) -> None:
        """Count a collective that has ended, ``ended`` (None: now): ``open_seconds`` from its begin, ``waited_seconds``
        of them waited for. Record its span."""
        super().count_seconds(tag, open_seconds, waited_seconds)
        now = time.perf_counter() if ended is None else ended
        pending = self._pending.get((tag.phase, tag.name))
        nbytes = pending.popleft()[1] if pending else 0
        self._writer.span(self._kinds[tag.phase], tag.name, now - open_seconds, now, waited_seconds, nbytes)
