"""Rows of the table: the columns of ended steps, merged, and their lines.

A row maps columns to numbers and covers one step or several; when rows are merged, each column combines their values by
its rule (`schema.Column`): a sum, a mean, the first, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

from .block import Memory
from .lines import encode_text
from .schema import COLUMN_NAMES, COLUMNS

Row = dict[str, float]
"""Numbers by column; an absent column is null in the file, and so is None in a column of one step."""
EndedStep = tuple[int, float, float, list[Any], int, Memory, Row, dict[str, Any]]
"""The fields of a `StepBlock`, then columns of the step's row: those that were counted, and those given at its end. A
plain tuple, as one is made in every step.
"""
_MERGE_RULE = {column.name: column.merge for column in COLUMNS}
_RULES: dict[str, Callable[[Sequence[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}
_MERGE_VALUES = {column.name: _RULES[column.merge] for column in COLUMNS}
_INTEGERS = ("skipped", "samples", "tokens", "collectives")
_FORMATS = {
    **{name: "%.17g" for name in COLUMN_NAMES if name in _INTEGERS or name.endswith("_bytes")},
    "first": "%d",
    "steps": "%d",
    "began": "%.6f",
}
_NOT_FINITE = re.compile(r"-?(?:nan|inf)")


def merge_steps(steps: Sequence[EndedStep], parts: Sequence[slice], unix: float) -> list[Row]:
    """Return one row for each of ``parts``, slices of consecutive ``steps``, with the steps' columns merged.

    ``unix``: Unix seconds at 0 of the steps' clock.
    """
    numbers, begins, seconds, *_, counted, values = zip(*steps, strict=True)
    rows: list[Row] = [{} for _ in parts]
    _add_columns(rows, parts, counted)
    _add_columns(rows, parts, values)
    for row, part in zip(rows, parts, strict=True):
        row["first"], row["steps"], row["began"] = numbers[part.start], len(numbers[part]), unix + begins[part.start]
        row["seconds"] = sum(seconds[part])
    return rows


def _add_columns(rows: Sequence[Row], parts: Sequence[slice], steps: Sequence[Row]) -> None:
    """Add the columns of ``steps`` to ``rows``, one row for each of ``parts``, slices of the steps, merged by the
    columns' rules.

    A column that no step of a part has stays absent from its row.
    """
    widths = list(map(len, steps))
    try:
        shared = {name: list(map(itemgetter(name), steps)) for name in steps[widths.index(min(widths))]}
    except KeyError:  # no step has only columns that all have
        shared = {}
    for name, column in shared.items():
        merge, complete = _MERGE_VALUES[name], None not in column
        for row, part in zip(rows, parts, strict=True):
            numbers = column[part] if complete else [number for number in column[part] if number is not None]
            if numbers:
                row[name] = merge(numbers)
    if max(widths) == len(shared):
        return
    for row, part in zip(rows, parts, strict=True):
        wider = [step for step in steps[part] if len(step) > len(shared)]
        for name in dict.fromkeys(chain.from_iterable(wider)).keys() - shared.keys():
            numbers = [step[name] for step in wider if step.get(name) is not None]
            if numbers:
                row[name] = _MERGE_VALUES[name](numbers)


def merge_into(row: Row, later: Row) -> None:
    """Merge the row ``later`` into ``row``, in place, by the columns' rules. The steps of ``later`` follow those of
    ``row``; a column that ``row`` lacks is taken over."""
    weight, more = row["steps"], later["steps"]
    for name, value in later.items():
        rule = _MERGE_RULE[name]
        if name not in row or rule == "last":
            row[name] = value
        elif rule == "sum":
            row[name] += value
        elif rule == "mean":
            row[name] = (row[name] * weight + value * more) / (weight + more)
        elif rule != "first" and (value < row[name]) == (rule == "min"):
            row[name] = value


def encode_row(row: Row) -> bytes:
    """Return a row as a line of the table; missing columns, NaN and infinities are null."""
    form, values = _row_format(tuple(row))
    text = form % values(row)
    if "a" in text or "i" in text:  # of nan and inf, which JSON has not; one letter is found faster
        text = _NOT_FINITE.sub("null", text)
    return encode_text(text)


@cache
def _row_format(names: tuple[str, ...]) -> tuple[str, Callable[[Row], Any]]:
    """Return (a %-format for the line of a row with the columns ``names``, a function that returns a row's values for
    it); cached.

    Columns of the table that are not in ``names`` are null. Integers are exact, times of day to the microsecond, other
    numbers to ten digits.
    """
    shown = (_FORMATS.get(name, "%.10g") if name in names else "null" for name in COLUMN_NAMES)
    return f"[{','.join(shown)}]", itemgetter(*(name for name in COLUMN_NAMES if name in names))
