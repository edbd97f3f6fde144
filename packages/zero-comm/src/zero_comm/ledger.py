"""Counts what travels: calls and bytes by phase and name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .tag import Tag


@dataclass
class LedgerRow:
    """Totals of one (phase, name): number of collectives, bytes that this rank sent, and how many of those left its
    node; seconds from the start of collectives to the end of waiting for them, and of waiting."""

    calls: int = 0
    sent_bytes: int = 0
    across_bytes: int = 0
    open_seconds: float = 0.0
    waited_seconds: float = 0.0


class Ledger:
    """Adds up the bytes this rank hands to the transport, without protocol headers.

    One ledger serves all groups of an engine. Reading it costs nothing on the wire. What leaves the node is counted
    apart where the groups know their `Topology`.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], LedgerRow] = {}

    def count(self, tag: Tag, sent_bytes: int, across_bytes: int = 0) -> None:
        """Add one collective that sends ``sent_bytes`` bytes from this rank, ``across_bytes`` of them to other
        nodes."""
        row = self._row(tag)
        row.calls += 1
        row.sent_bytes += sent_bytes
        row.across_bytes += across_bytes

    def arrived(self, tag: Tag, open_seconds: float, waited_seconds: float) -> None:
        """Add that a collective is over, so long after its start, of which this rank has waited for it."""
        row = self._row(tag)
        row.open_seconds += open_seconds
        row.waited_seconds += waited_seconds

    def reset(self) -> None:
        """Forget everything counted so far."""
        self._rows.clear()

    def sent_bytes(self, phase: str | None = None) -> int:
        """Bytes sent by this rank, of one phase or of all."""
        return sum(row.sent_bytes for (p, _), row in self._rows.items() if phase is None or p == phase)

    def across_bytes(self, phase: str | None = None) -> int:
        """Bytes that this rank sent to other nodes, of one phase or of all."""
        return sum(row.across_bytes for (p, _), row in self._rows.items() if phase is None or p == phase)

    def calls(self, phase: str | None = None) -> int:
        """Number of collectives, of one phase or of all."""
        return sum(row.calls for (p, _), row in self._rows.items() if phase is None or p == phase)

    def seconds(self, *phases: str) -> tuple[float, float]:
        """Seconds in which collectives of ``phases`` were open, added up, and those of them in which this rank waited.

        A message that has arrived counts as open until somebody waits for it: 1 - waited / open is the share of the
        communication behind which this rank did something else, not the share of time that the network was busy.
        """
        rows = [row for (phase, _), row in self._rows.items() if phase in phases]
        return sum(row.open_seconds for row in rows), sum(row.waited_seconds for row in rows)

    def __iter__(self) -> Iterator[tuple[str, str, LedgerRow]]:
        """Yield ``(phase, name, row)`` in order of first use."""
        for (phase, name), row in self._rows.items():
            yield phase, name, row

    def _row(self, tag: Tag) -> LedgerRow:
        return self._rows.setdefault((tag.phase, tag.name), LedgerRow())
