"""Counts what travels: calls and bytes by phase and name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .tag import Tag


@dataclass
class LedgerRow:
    """Totals of one (phase, name): number of collectives, bytes that this rank sent, and how many of those left its
    node."""

    calls: int = 0
    sent_bytes: int = 0
    across_bytes: int = 0


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
        row = self._rows.setdefault((tag.phase, tag.name), LedgerRow())
        row.calls += 1
        row.sent_bytes += sent_bytes
        row.across_bytes += across_bytes

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

    def __iter__(self) -> Iterator[tuple[str, str, LedgerRow]]:
        """Yield ``(phase, name, row)`` in order of first use."""
        for (phase, name), row in self._rows.items():
            yield phase, name, row
