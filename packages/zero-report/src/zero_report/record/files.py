"""The three files of one rank, each within a bound."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from .lines import encode, encode_text
from .schema import COLUMN_NAMES, COLUMNS, RECENT_STEPS

Row = dict[str, float]
"""Numbers by column; a column that is not there is null in the file."""
_MERGE = {column.name: column.merge for column in COLUMNS}
_TOGETHER: dict[str, Callable[[Sequence[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}
_WHOLE = ("first", "steps", "skipped", "samples", "tokens", "collectives")
_FORMATS = {
    **{name: "%.17g" for name in COLUMN_NAMES if name in _WHOLE or name.endswith("_bytes")},
    "began": "%.6f",
}
_NOT_FINITE = re.compile(r"-?(?:nan|inf)")


class Appended:
    """A file to which lines are appended; its last line may be provisional and is then written over by the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._whole = 0
        self._size = 0

    @property
    def whole_bytes(self) -> int:
        """Bytes of lines that stay."""
        return self._whole

    def append(self, lines: bytes, provisional: bytes = b"") -> None:
        """Write ``lines`` after those that stay, and ``provisional`` after them."""
        data = lines + provisional
        if data:
            _write_all(self._descriptor, data, self._whole)
        size = self._whole + len(data)
        if size < self._size:
            os.ftruncate(self._descriptor, size)
        self._whole, self._size = self._whole + len(lines), size

    def replace(self, data: bytes) -> None:
        """Put ``data`` in place of everything, so that a reader finds the old lines or the new ones."""
        scratch = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        _write_all(descriptor, data, 0)
        os.replace(scratch, self._path)
        os.close(self._descriptor)
        self._descriptor, self._whole, self._size = descriptor, len(data), len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Table:
    """The steps of a rank in at most ``max_bytes``: rows are merged two by two when the file would be too large."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = Appended(path)
        self._head = encode(COLUMN_NAMES)
        self._max_bytes = max_bytes
        self._line_bytes = 0
        self._rows: list[Row] = []
        self._written = 0
        self._merged = False
        self._stride = 1
        self._file.append(self._head)

    def add(self, rows: Sequence[Row]) -> None:
        """Add steps, one row each."""
        if rows and not self._line_bytes:
            self._line_bytes = len(_line(rows[0]))
        while self._line_bytes * (len(self._rows) + len(rows) // self._stride) > self._max_bytes:
            self._merge()
        at = 0
        while at < len(rows):
            room = self._stride - int(self._rows[-1]["steps"]) if self._rows else 0
            if room > 0:
                merge(self._rows[-1], together(rows[at : at + room]))
                at += room
            else:
                self._rows.append(together(rows[at : at + self._stride]))
                at += self._stride

    def flush(self) -> None:
        """Write what came since the last time; the last row too, in place."""
        if not self._rows:
            return
        self._write()
        if self._file.whole_bytes > self._max_bytes:  # lines grew
            self._line_bytes = -(-self._file.whole_bytes // len(self._rows))
            self._merge()
            self._write()

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        self._file.close()

    def _write(self) -> None:
        if self._merged:
            self._file.replace(self._head + b"".join(map(_line, self._rows[:-1])))
            self._file.append(b"", _line(self._rows[-1]))
        else:
            self._file.append(b"".join(map(_line, self._rows[self._written : -1])), _line(self._rows[-1]))
        self._written, self._merged = len(self._rows) - 1, False

    def _merge(self) -> None:
        """Let a row cover twice the steps; the file is written anew by the next `flush`."""
        self._stride *= 2
        merged: list[Row] = []
        for row in self._rows:
            if merged and merged[-1]["steps"] + row["steps"] <= self._stride:
                merge(merged[-1], row)
            else:
                merged.append(row)
        self._rows, self._merged = merged, True


class Timeline:
    """The spans of steps in at most ``max_bytes``: older steps are thinned by powers of two when the file is full."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = Appended(path)
        self._max_bytes = max_bytes
        self._blocks: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._stride = 1
        self._coarser = False

    def kept(self, first: int, count: int) -> list[int]:
        """Return the places of those of ``count`` steps that are over, from step ``first`` on, for which the file still
        has room; what it holds makes room for them."""
        old = max(0, count - RECENT_STEPS)
        each = self._bytes / len(self._blocks) if self._blocks else 0.0
        held = self._bytes
        while held + each * (old // self._stride) > self._max_bytes and self._stride < first + count:
            self._stride, held, self._coarser = 2 * self._stride, held // 2, True
        return [*range(-first % self._stride, old, self._stride), *range(old, count)]

    def append(self, lines: Sequence[tuple[int, bytes]], under_way: bytes) -> None:
        """Write lines of steps that are over, each with its step, and the line of the one that is not."""
        self._blocks += lines
        self._bytes += sum(len(line) for _, line in lines)
        if self._coarser or self._bytes > self._max_bytes:
            self._thin()
            lines = ()
        self._file.append(b"".join(line for _, line in lines), under_way)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _thin(self) -> None:
        """Drop steps until half of the room is free, or only the recent ones are left."""
        old, recent = self._blocks[:-RECENT_STEPS], self._blocks[-RECENT_STEPS:]
        while True:
            old = [block for block in old if block[0] % self._stride == 0]
            self._bytes = sum(len(line) for _, line in (*old, *recent))
            if self._bytes <= self._max_bytes // 2 or not old:
                break
            self._stride *= 2
        while self._bytes > self._max_bytes and len(recent) > 1:
            self._bytes -= len(recent.pop(0)[1])
        self._blocks, self._coarser = old + recent, False
        self._file.replace(b"".join(line for _, line in self._blocks))


class Notes:
    """Events in at most ``max_bytes``; what comes later is counted and left out, but for the last note."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = Appended(path)
        self._max_bytes = max_bytes
        self._left_out = 0

    def add(self, note: dict[str, Any]) -> None:
        """Write one note now."""
        line = encode(note)
        if self._file.whole_bytes + len(line) > self._max_bytes and self._file.whole_bytes:
            self._left_out += 1
            self._file.append(b"", encode({"note": "left_out", "at": note["at"], "count": self._left_out}))
        else:
            self._file.append(line)

    def close(self, last: dict[str, Any]) -> None:
        """Write the last note, whatever the bound, and close the file."""
        self._file.append(encode({**last, "left_out": self._left_out}))
        self._file.close()


def merge(row: Row, later: Row) -> None:
    """Add the steps of ``later``, which follow those of ``row``, to ``row``."""
    weight, more = row["steps"], later["steps"]
    for name, value in later.items():
        rule = _MERGE[name]
        if name not in row or rule == "last":
            row[name] = value
        elif rule == "sum":
            row[name] += value
        elif rule == "mean":
            row[name] = (row[name] * weight + value * more) / (weight + more)
        elif rule != "first" and (value < row[name]) == (rule == "min"):
            row[name] = value


def together(rows: Sequence[Row]) -> Row:
    """Return one row for ``rows`` of one step each, which follow one another."""
    first = rows[0]
    names = tuple(first)
    if all(tuple(row) == names for row in rows):
        columns = zip(names, zip(*(row.values() for row in rows), strict=True), strict=True)
        return {name: _TOGETHER[_MERGE[name]](column) for name, column in columns}
    row = dict(first)
    for later in rows[1:]:
        merge(row, later)
    return row


def _line(row: Row) -> bytes:
    form, values = _row_format(tuple(row))
    text = form % values(row)
    if "nan" in text or "inf" in text:  # which JSON cannot hold
        text = _NOT_FINITE.sub("null", text)
    return encode_text(text)


@cache
def _row_format(names: tuple[str, ...]) -> tuple[str, Callable[[Row], Any]]:
    """Return the format of rows with columns ``names``, and what gets its values; integers are exact, times of day to
    the microsecond, other numbers to ten digits."""
    shown = (_FORMATS.get(name, "%.10g") if name in names else "null" for name in COLUMN_NAMES)
    return f"[{','.join(shown)}]", itemgetter(*(name for name in COLUMN_NAMES if name in names))


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        at, view = at + written, view[written:]
