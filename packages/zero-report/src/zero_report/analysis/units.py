"""Totals of each unit: computing, messages, transfers, waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..record.parsing import Block, Span
from ..record.schema import COLLECTIVES, TIERS, SpanKind


@dataclass
class UnitSums:
    """Totals of one unit, parameter or message, over ranks and steps. ``computed`` and ``waited``: seconds;
    ``messages``: their number; the rest: bytes sent by gathers, reductions and other messages, and bytes read from and
    written to tiers.
    """

    name: str
    computed: float = 0.0
    gathered: int = 0
    reduced: int = 0
    other: int = 0
    read: int = 0
    written: int = 0
    messages: int = 0
    waited: float = 0.0


_BYTES = {
    SpanKind.GATHER: "gathered",
    SpanKind.PUBLISH: "gathered",
    SpanKind.REDUCE: "reduced",
    SpanKind.BROADCAST: "other",
    SpanKind.CONTROL: "other",
    SpanKind.CHECKPOINT: "other",
    SpanKind.EXCHANGE: "other",
    SpanKind.TIER_READ: "read",
    SpanKind.TIER_WRITE: "written",
}


def subject_of(span: Span) -> str:
    """Return the name of the unit, parameter or message that a span is for: the span's name or, for a tier's span,
    `link: thing`, the text after the colon."""
    return span.name.partition(":")[2].strip() or span.name if span.kind in TIERS else span.name


class AllUnits:
    """Sums up the spans of each unit, parameter or message, step by step: call `add` for every step, then `result`."""

    def __init__(self) -> None:
        self._found: dict[str, UnitSums] = {}

    def add(self, blocks: Mapping[int, Block]) -> None:
        """Add the spans of one step; ``blocks``: the step's spans by rank."""
        for block in blocks.values():
            for span in block.spans:
                if span.kind == SpanKind.COMPUTE:
                    self._sums_of(span.name).computed += span.duration / 1e6
                elif span.kind in COLLECTIVES or span.kind in TIERS:
                    tier = span.kind in TIERS
                    unit = self._sums_of(subject_of(span))
                    column = _BYTES[SpanKind(span.kind)]
                    setattr(unit, column, getattr(unit, column) + span.nbytes)
                    unit.messages += not tier
                    unit.waited += span.waited / 1e6

    def result(self) -> list[UnitSums]:
        """Return the totals, in the order in which the units first appeared."""
        return list(self._found.values())

    def _sums_of(self, name: str) -> UnitSums:
        """Return the totals of a unit by its name, to be added to; new ones if it has none yet."""
        return self._found.setdefault(name, UnitSums(name))
