"""Compare a plan with the record of a run: planned and measured numbers, and the error of each.

The record (of zero-report) has a table, of which each row sums over some steps, and for some steps a block of spans:
timed events with the bytes that they moved. A phase is a kind of collective, as in `SentRow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from .bounding import step_bounds
from .errors import PlanError
from .limits import step_time
from .machine import Machine
from .planned import Plan, RankPlan

if TYPE_CHECKING:
    from zero_report.record.parsing import Block
    from zero_report.record.reader import Attempt, RankRecord

_LEARNING = 2  # steps in which the engine learns the order of its units
_OWNERS = {"parameter shards": "parameters", "secondary shards": "parameters", "placeholders": "parameters"}
_OWNERS |= {"masters": "masters", "optimizer states": "states"}
"""Kind of model state in a plan -> its owner in a record, for those that are the same at every moment of a step."""


class ComparedRow(NamedTuple):
    """One number of a rank: as planned and as measured, in ``unit`` ("B" or "s").

    ``what``: says which number. ``is_bound``: the planned number is a lower bound.
    """

    rank: int
    what: str
    unit: str
    planned: float
    measured: float
    is_bound: bool = False

    @property
    def error(self) -> float | None:
        """The relative error of the planned number, planned / measured - 1. If 0 was measured: 0 if 0 was planned, else
        None.
        """
        if self.measured:
            return self.planned / self.measured - 1
        return None if self.planned else 0.0


def compare(found: Plan, record: str | Path, machine: Machine | None = None) -> tuple[ComparedRow, ...]:
    """Return the planned numbers of each rank of ``found``, a plan, beside those that a run measured.

    ``record``: the folder that ``run_record.path`` names; its last attempt counts, without the first two steps.
    ``machine``: compare the least time of a step, too. Numbers that the record does not have are left out. Raises
    `PlanError` if there is no record, or one of another number of ranks or without a third step, or if zero-report is
    not installed.
    """
    try:
        from zero_report import RecordError, read_run
    except ModuleNotFoundError as error:
        raise PlanError(f"a comparison with a run needs {error.name}: pip install 'zero-plan[report]'") from error
    try:
        attempt = read_run(record).last
    except RecordError as error:
        raise PlanError(str(error)) from error
    if attempt.world_size != found.world_size:
        raise PlanError(f"{record}: expected a run of {found.world_size} ranks, as planned, got {attempt.world_size}")
    rows = [row for rank in found.ranks for row in _rank_rows(rank, attempt, found.world_size, machine)]
    if not rows:
        raise PlanError(f"{record}: expected at least {_LEARNING + 1} steps of the planned ranks: the first two learn")
    return tuple(rows)


def _rank_rows(plan: RankPlan, attempt: Attempt, world_size: int, machine: Machine | None) -> Iterator[ComparedRow]:
    """Yield the compared rows of the rank that ``plan`` is for; none if the record has no third step of it. Without
    ``machine`` there is no row of times.
    """
    record = attempt.ranks.get(plan.rank)
    measured = None if record is None else _Measured(record)
    if measured is None or not measured.seconds:
        return
    yield from _memory_rows(plan, measured, on_host=attempt.facts.get("machine", {}).get("device") == "cpu")
    yield from _moved_rows(plan, measured)
    if machine is not None:
        least = step_time(step_bounds(plan, machine, world_size=world_size)).least
        yield ComparedRow(plan.rank, "time of a step", "s", least, median(measured.seconds), is_bound=True)


def _memory_rows(plan: RankPlan, measured: _Measured, *, on_host: bool) -> Iterator[ComparedRow]:
    """Yield the rows of the model states in memory, by owner, and of the peak of memory. Numbers that were not measured
    have no row.

    ``on_host``: the run computed on the CPU, so that the peak is that of host memory.
    """
    held = dict.fromkeys(_OWNERS.values(), 0)
    for row in plan.held:
        if row.tier != "nvme" and row.kind in _OWNERS:
            held[_OWNERS[row.kind]] += row.nbytes
    for owner, planned in held.items():
        found = measured.highest(f"{owner}_bytes")
        if found is not None and (planned or found):
            yield ComparedRow(plan.rank, f"{owner} in memory", "B", planned, found)
    highest = measured.highest_memory() if on_host else measured.highest("device_bytes")
    if highest is not None:
        tiers = plan.peaks if on_host else plan.peaks[:1]
        yield ComparedRow(plan.rank, "peak of memory", "B", sum(peak.nbytes for peak in tiers), highest)


def _moved_rows(plan: RankPlan, measured: _Measured) -> Iterator[ComparedRow]:
    """Yield the rows of the bytes that a step sends (by phase, in all, to other nodes), reads from drives and writes to
    them. Numbers that were not measured have no row.
    """
    sent: dict[str, int] = {}
    for row in plan.sent:
        sent[row.phase] = sent.get(row.phase, 0) + row.sent_bytes
    across = sum(row.across_bytes for row in plan.sent)
    drives = {"read from drives": plan.read, "written to drives": plan.written}
    for phase, planned in sent.items():
        if phase != "control":  # the size of these messages depends on values
            yield from _row_if_measured(plan.rank, f"sent, {phase}", planned, measured.median_span_bytes(phase))
    yield from _row_if_measured(plan.rank, "sent, all", sum(sent.values()), measured.per_step("sent_bytes"))
    yield from _row_if_measured(plan.rank, "sent to other nodes", across, measured.per_step("across_bytes"))
    for name, planned in drives.items():
        yield from _row_if_measured(plan.rank, name, planned, measured.median_span_bytes(name))


def _row_if_measured(rank: int, what: str, planned: int, measured: float | None) -> Iterator[ComparedRow]:
    """Yield the row of the number ``what`` in bytes; nothing if it was not measured (``measured`` is None), or both
    numbers are 0.
    """
    if measured is not None and (planned or measured):
        yield ComparedRow(rank, what, "B", planned, measured)


class _Measured:
    """The numbers that one rank's ``record`` has of the steps after the first two, in which the engine learns. There
    may be none: then `seconds` is empty.

    Attributes:
        seconds: by row of the table, the seconds per step.
    """

    def __init__(self, record: RankRecord) -> None:
        table = record.table
        first = table["first"]
        self._rows = [row for row in range(len(first)) if first[row] - first[0] >= _LEARNING]
        self._table = table
        self.seconds = self._values("seconds")
        from_step = first[0] + _LEARNING if len(first) else 0
        blocks = (record.block(step) for step in record.steps if step >= from_step)
        self._blocks = [block for block in blocks if block is not None and not block.open]

    def per_step(self, column: str) -> float | None:
        """Return the median, over the rows of the table, of the value per step in ``column``; None without values."""
        values = self._values(column)
        return median(values) if values else None

    def highest(self, column: str) -> float | None:
        """Return the highest value in ``column`` of the table; None without values."""
        values = [float(self._table[column][row]) for row in self._rows]
        return max((value for value in values if value == value), default=None)

    def highest_memory(self) -> float | None:
        """Return the highest sum, in bytes, of the memory of all known owners at one moment; None if the record has no
        samples of memory.
        """
        samples = [owners for block in self._blocks for _, owners in block.memory]
        sums = [sum(nbytes for owner, nbytes in owners.items() if owner != "other") for owners in samples]
        return max(sums, default=None)

    def median_span_bytes(self, what: str) -> float | None:
        """Return the median over steps of the bytes of one kind of span; None if there is no step of which all spans
        are recorded.

        ``what``: a phase, "read from drives" or "written to drives".
        """
        sums = [_span_bytes(block, what) for block in self._blocks if not block.left_out]
        return median(sums) if sums else None

    def _values(self, column: str) -> list[float]:
        """Return, for each row of the table, the value per step in ``column``, as a row sums over several steps.
        Missing values are left out.
        """
        values = [float(self._table[column][row] / self._table["steps"][row]) for row in self._rows]
        return [value for value in values if value == value]


def _span_bytes(block: Block, what: str) -> int:
    """Return the bytes of those spans of ``block`` that are of one kind.

    ``what``: a phase, "read from drives" or "written to drives".
    """
    from zero_report import SpanKind

    drives = {"read from drives": SpanKind.TIER_READ, "written to drives": SpanKind.TIER_WRITE}
    kind = drives.get(what) or SpanKind[what.upper()]
    spans = (span for span in block.spans if span.kind == kind)
    return sum(span.nbytes for span in spans if what not in drives or span.name.startswith("drive, "))
