"""Count communication: calls, bytes and seconds by phase and name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .device_times import DeviceMarks, DeviceTimes
from .tag import Tag


@dataclass
class LedgerRow:
    """Totals of one (phase, name) of a `Tag`.

    ``calls``: collectives. ``sent_bytes``: sent by this rank. ``across_bytes``: the part of ``sent_bytes`` that went to
    other nodes. ``open_seconds``: from the start of a collective to the end of waiting for it. ``waited_seconds``: the
    part of ``open_seconds`` in which this rank waited. ``untimed``: collectives on an accelerator whose seconds are in
    neither.
    """

    calls: int = 0
    sent_bytes: int = 0
    across_bytes: int = 0
    open_seconds: float = 0.0
    waited_seconds: float = 0.0
    untimed: int = 0


class Ledger:
    """Adds up the bytes that this rank hands to the transport, without protocol headers.

    One ledger serves all groups of an engine. Reading it sends nothing. Bytes to other nodes are also counted
    separately, where the groups know their `Topology`. A phase is that of a `Tag`: "gather", "reduce" and so on.

    Attributes:
        times_devices: whether collectives of accelerator tensors are timed, by three events each; set it before they
            start. Without it they count as untimed.
    """

    def __init__(self) -> None:
        self.times_devices = False
        self._rows: dict[tuple[str, str], LedgerRow] = {}
        self._device_times = DeviceTimes()
        self._in_hops = False

    def count(self, tag: Tag, sent_bytes: int, across_bytes: int = 0) -> None:
        """Add one collective, under the phase and the name of ``tag``, in which this rank sends ``sent_bytes``,
        ``across_bytes`` of them to other nodes."""
        row = self._row(tag)
        row.calls += 1
        row.sent_bytes += sent_bytes
        row.across_bytes += across_bytes

    def count_seconds(self, tag: Tag, open_seconds: float, waited_seconds: float, ended: float | None = None) -> None:
        """Add the times of the finished collective ``tag``: ``open_seconds`` since its start, ``waited_seconds`` of
        them spent waiting. ``ended``: when, by `time.perf_counter`, None for now; ignored here, for subclasses that
        record it."""
        row = self._row(tag)
        row.open_seconds += open_seconds
        row.waited_seconds += waited_seconds

    def count_on_device(self, tag: Tag, marks: DeviceMarks) -> None:
        """Add the collective ``tag`` on an accelerator by its ``marks``, after its wait. If they are timed, a later
        call counts its times, once the device has completed it; else it counts as untimed. Does nothing inside
        `hops_of_one`."""
        if self._in_hops:
            return
        if marks.timed:
            self._device_times.add(tag, marks)
            self.count_completed()
        else:
            self._row(tag).untimed += 1

    @contextmanager
    def hops_of_one(self) -> Iterator[None]:
        """Leave out the times of the collectives on an accelerator that the block waits for: they are the hops of one
        collective, which the caller times as a whole. Their calls and bytes count."""
        self._in_hops = True
        try:
            yield
        finally:
            self._in_hops = False

    def count_completed(self) -> None:
        """Count the times of the collectives that the accelerator has completed, without waiting for it."""
        for found in self._device_times.completed():
            self.count_seconds(found.tag, found.open_seconds, found.waited_seconds, found.ended)
        while self._device_times.unmeasured:
            self._row(self._device_times.unmeasured.pop()).untimed += 1

    def reset(self) -> None:
        """Drop all counts, and the times of collectives that an accelerator has not completed."""
        self._rows.clear()
        self._device_times = DeviceTimes()

    def sent_bytes(self, phase: str | None = None) -> int:
        """Return the bytes that this rank sent in ``phase``; in all phases for None."""
        return sum(row.sent_bytes for (p, _), row in self._rows.items() if phase is None or p == phase)

    def across_bytes(self, phase: str | None = None) -> int:
        """Return the bytes that this rank sent to other nodes in ``phase``; in all phases for None."""
        return sum(row.across_bytes for (p, _), row in self._rows.items() if phase is None or p == phase)

    def calls(self, phase: str | None = None) -> int:
        """Return the number of collectives in ``phase``; in all phases for None."""
        return sum(row.calls for (p, _), row in self._rows.items() if phase is None or p == phase)

    def seconds(self, *phases: str) -> tuple[float, float]:
        """Return ``(open, waited)``: the seconds in which collectives of ``phases`` were open, and the seconds of these
        in which this rank waited, both summed over the collectives; zeros without ``phases``.

        A message that has arrived counts as open until this rank waits for it. So 1 - waited / open is the fraction of
        communication that overlaps with this rank's other work, not the fraction of time that the network was busy.
        On an accelerator, only of the collectives that it has completed; see `untimed`.
        """
        self.count_completed()
        rows = [row for (phase, _), row in self._rows.items() if phase in phases]
        return sum(row.open_seconds for row in rows), sum(row.waited_seconds for row in rows)

    def untimed(self, *phases: str) -> int:
        """Return the number of collectives of ``phases`` whose times `seconds` leaves out: on an accelerator, those
        that were not timed, or are not complete."""
        self.count_completed()
        rows = sum(row.untimed for (phase, _), row in self._rows.items() if phase in phases)
        return rows + self._device_times.waiting(phases)

    def __iter__(self) -> Iterator[tuple[str, str, LedgerRow]]:
        """Yield ``(phase, name, row)`` for every pair that was counted, in order of first use. The rows are the
        ledger's own and go on counting. An accelerator's times are in them as of the last `count_completed`."""
        for (phase, name), row in self._rows.items():
            yield phase, name, row

    def _row(self, tag: Tag) -> LedgerRow:
        """Return the totals of the phase and name of ``tag``, to be changed by the caller; zeros at first."""
        return self._rows.setdefault((tag.phase, tag.name), LedgerRow())
