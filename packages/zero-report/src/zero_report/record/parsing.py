"""Parsing the lines of a record: the table and the spans of steps from JSON of any shape, damaged lines left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .schema import COLUMN_NAMES
from .shapes import is_block, is_number, load_json

Array = NDArray[np.float64]


class Span(NamedTuple):
    """One span of a step: a run of time in which a rank did one thing.

    Times are in microseconds, ``begin`` from the start of the rank's step; in the last ``waited`` of them the rank only
    waited. ``kind``: a `SpanKind`; ``name``: the unit, parameter or message that it is for; ``nbytes``: bytes moved.
    """

    kind: int
    name: str
    begin: int
    duration: int
    waited: int
    nbytes: int

    @property
    def end(self) -> int:
        """End of the span, in microseconds from the start of the step."""
        return self.begin + self.duration


@dataclass(frozen=True)
class Block:
    """The spans of one rank in one step.

    ``began``: start of the step in Unix seconds. ``us``: its duration in microseconds. ``left_out``: number of spans
    that were not recorded. ``memory``: pairs of microseconds since the step's start and bytes by owner. ``open``: the
    step was still running when it was written, as were its last ``under_way`` spans.
    """

    step: int
    began: float
    us: int
    spans: tuple[Span, ...]
    left_out: int
    memory: tuple[tuple[int, dict[str, int]], ...]
    open: bool
    under_way: int = 0


def parse_line(body: bytes) -> Any:
    """Return the value of ``body``, the JSON of a line; None if it is no JSON."""
    try:
        return load_json(body)
    except ValueError:
        return None


def _parse_lines(bodies: list[bytes]) -> list[Any]:
    """Return the values of the JSON of many lines, as `parse_line` returns them, all in one parse if all are JSON."""
    try:
        values = load_json(b"[" + b",".join(bodies) + b"]")
    except ValueError:
        values = []
    return values if len(values) == len(bodies) else [parse_line(body) for body in bodies]


def _is_cell(value: Any) -> bool:
    """Return whether ``value`` may stand in a row of a table: a number, or None if it is missing."""
    return value is None or is_number(value)


def parse_table(bodies: list[bytes]) -> tuple[dict[str, Array], int]:
    """Return (the columns of a table by name, the number of lines left out) from the JSON of its lines. Missing numbers
    are NaN.

    Lines are left out if they have another number of values than the first line has names, or no numbers for the steps
    and seconds that they cover. If the first line is damaged, the names are taken to be those of this version.
    """
    rows, names = _parse_lines(bodies), list(COLUMN_NAMES)
    if rows and isinstance(rows[0], list) and rows[0] and all(isinstance(name, str) for name in rows[0]):
        names = rows.pop(0)
    whole = [row for row in rows if isinstance(row, list) and len(row) == len(names)]
    try:
        values = np.array(whole, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.empty(0)
    if whole and values.ndim != 2:
        values = np.array([row for row in whole if all(map(_is_cell, row))], dtype=np.float64)
    values = values.reshape(-1, len(names))
    columns = {name: values[:, number] for number, name in enumerate(names)}
    table = {**{name: np.full(len(values), np.nan) for name in COLUMN_NAMES}, **columns}
    known = np.logical_and.reduce([np.isfinite(table[name]) for name in ("first", "steps", "began", "seconds")])
    if not known.all():
        table = {name: column[known] for name, column in table.items()}
    return table, len(rows) - int(known.sum())


def parse_block(body: bytes) -> Block | None:
    """Return the spans of a step from ``body``, the JSON of a line of the timeline; None if it is not laid out as the
    format says."""
    value = parse_line(body)
    if not is_block(value):
        return None
    return Block(
        step=value["step"],
        began=value["began"],
        us=value["us"],
        spans=tuple(_parse_spans(value["names"], value["spans"])),
        left_out=value["left_out"],
        memory=tuple((at, owners) for at, owners in value["memory"]),
        open=value.get("open", False),
        under_way=value.get("under_way", 0),
    )


def _parse_spans(names: list[str], flat: list[int]) -> Iterator[Span]:
    """Yield the spans of a block; ``flat``: six integers for each, of which the second is an index into ``names``."""
    for at in range(0, len(flat), 6):
        kind, name, begin, duration, waited, nbytes = flat[at : at + 6]
        yield Span(kind, names[name], begin, duration, waited, nbytes)
