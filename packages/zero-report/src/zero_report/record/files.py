"""Writing the three files of one rank, each of a bounded size. ``unix`` is Unix seconds at 0 of the clock that measured
the steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .lines import encode
from .rows import EndedStep, Row, encode_row, merge_into, merge_steps
from .schema import COLUMN_NAMES, RECENT_STEPS


class Appended:
    """A file of lines to append to, emptied at the start. Its last line may be provisional: the next call overwrites
    it. For one thread at a time; methods raise OSError. ``path``: of the file, which is made anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._final = 0
        self._size = 0

    @property
    def final_bytes(self) -> int:
        """Bytes of the lines that are not provisional."""
        return self._final

    def append(self, lines: bytes, provisional: bytes = b"") -> None:
        """Write ``lines`` over a provisional line, if there is one, and ``provisional`` behind them; either may be
        empty.

        Both end with a newline. A provisional line that is not written again is cut off. After an OSError the file
        holds no further final lines, and the call may be repeated.
        """
        data = lines + provisional
        if data:
            self._size = max(self._size, self._final + len(data))  # a call that fails may have written part of it
            _write_all_at(self._descriptor, data, self._final)
        size = self._final + len(data)
        if size < self._size:
            os.ftruncate(self._descriptor, size)
        self._final, self._size = self._final + len(lines), size

    def replace(self, data: bytes) -> None:
        """Replace the whole content by ``data``, atomically: a reader finds either the old lines or the new ones."""
        scratch = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all_at(descriptor, data, 0)
            os.replace(scratch, self._path)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                scratch.unlink()  # it takes room, which may be what is missing
            raise
        former, self._descriptor = self._descriptor, descriptor
        self._final = self._size = len(data)
        os.close(former)

    def close(self) -> None:
        """Close the file. Raises OSError where the file system tells only now that data was not written; the file is
        closed all the same."""
        os.close(self._descriptor)


class Table:
    """The table of a rank in at most ``max_bytes``: neighbouring rows are merged when the file would grow larger.

    Its first line, the names of the columns, is written at once. For one thread at a time. ``path``: of the file, which
    is made anew.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = Appended(path)
        self._head = encode(COLUMN_NAMES)
        self._max_bytes = max_bytes
        self._line_bytes = 0
        self._rows: list[Row] = []
        self._written = 0
        self._rows_merged = False
        self._stride = 1
        self._file.append(self._head)

    def add(self, steps: Sequence[EndedStep], unix: float) -> None:
        """Add rows for ended steps, which follow those added before. All rows cover the same number of steps, so the
        last row is first filled up.

        Merges rows where the file would become too large. The rows are written by `flush`.
        """
        if not steps:
            return
        if not self._line_bytes:
            self._line_bytes = len(encode_row(*merge_steps(steps[:1], [slice(0, 1)], unix)))
        while self._line_bytes * (len(self._rows) + len(steps) // self._stride) > self._max_bytes:
            self._merge_pairs()
        room = self._stride - int(self._rows[-1]["steps"]) if self._rows else 0
        parts = [slice(at, at + self._stride) for at in range(room, len(steps), self._stride)]
        if room:
            parts.insert(0, slice(0, room))
        rows = merge_steps(steps, parts, unix)
        if room:
            merge_into(self._rows[-1], rows.pop(0))
        self._rows += rows

    def flush(self) -> None:
        """Write the rows that were added since the last call; the last row, which may still grow, is provisional.

        Merges rows when the lines turn out too long for the bound. Does nothing without rows.
        """
        if not self._rows:
            return
        self._write()
        if self._file.final_bytes > self._max_bytes:  # lines grew
            self._line_bytes = -(-self._file.final_bytes // len(self._rows))
            self._merge_pairs()
            self._write()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self) -> None:
        """Append the new rows to the file, or rewrite it if rows were merged; the last row is provisional."""
        if self._rows_merged:
            self._file.replace(self._head + b"".join(map(encode_row, self._rows[:-1])))
            self._file.append(b"", encode_row(self._rows[-1]))
        else:
            self._file.append(b"".join(map(encode_row, self._rows[self._written : -1])), encode_row(self._rows[-1]))
        self._written, self._rows_merged = len(self._rows) - 1, False

    def _merge_pairs(self) -> None:
        """Merge neighbouring rows, so that a row covers up to twice as many steps; the next `flush` rewrites the
        file."""
        self._stride *= 2
        merged: list[Row] = []
        for row in self._rows:
            if merged and merged[-1]["steps"] + row["steps"] <= self._stride:
                merge_into(merged[-1], row)
            else:
                merged.append(row)
        self._rows, self._rows_merged = merged, True


class Timeline:
    """The timeline of a rank in at most ``max_bytes``, unless the newest step alone is larger. ``path``: of the file,
    which is made anew.

    When it is full, older steps stay only if they are multiples of the stride, a growing power of two; the last
    `RECENT_STEPS` all stay.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = Appended(path)
        self._max_bytes = max_bytes
        self._blocks: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._stride = 1
        self._coarser = False
        self._unwritten: list[bytes] = []

    def indices_to_keep(self, first: int, count: int) -> list[int]:
        """Return which of ``count`` ended steps to append, as indices from 0; the steps have the consecutive numbers
        from ``first`` on.

        They are the last `RECENT_STEPS`, and multiples of the stride before them. Doubles the stride until older steps
        have room; the next `append` drops the steps in the file that are no multiples of it.
        """
        old = max(0, count - RECENT_STEPS)
        each = self._bytes / len(self._blocks) if self._blocks else 0.0
        held = self._bytes
        while held + each * (old // self._stride) > self._max_bytes and self._stride < first + count:
            self._stride, held, self._coarser = 2 * self._stride, held // 2, True
        return [*range(-first % self._stride, old, self._stride), *range(old, count)]

    def append(self, lines: Sequence[tuple[int, bytes]], under_way: bytes) -> None:
        """Write ``lines``, pairs (step, line) of ended steps, and ``under_way``, the line of the step that has not
        ended, or nothing if it is empty.

        The latter is provisional: the next call overwrites it. Drops older steps when the file is full. After an
        OSError the next call writes these ``lines`` too.
        """
        self._blocks += lines
        self._unwritten += [line for _, line in lines]
        self._bytes += sum(len(line) for _, line in lines)
        if self._coarser or self._bytes > self._max_bytes:
            self._unwritten.clear()  # it writes all blocks, in the next call if it fails in this one
            self._drop_old_steps()
        self._file.append(b"".join(self._unwritten), under_way)
        self._unwritten.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _drop_old_steps(self) -> None:
        """Drop older steps until half of the bound is free or none is left, then recent ones as long as the file is
        beyond the bound; rewrite the file.

        The newest step always stays.
        """
        old, recent = self._blocks[:-RECENT_STEPS], self._blocks[-RECENT_STEPS:]
        while True:
            old = [block for block in old if block[0] % self._stride == 0]
            self._bytes = sum(len(line) for _, line in (*old, *recent))
            if self._bytes <= self._max_bytes // 2 or not old:
                break
            self._stride *= 2
        while self._bytes > self._max_bytes and len(recent) > 1:
            self._bytes -= len(recent.pop(0)[1])
        self._blocks, self._coarser = old + recent, True  # until the file is rewritten
        self._file.replace(b"".join(line for _, line in self._blocks))
        self._coarser = False


class Notes:
    """The notes of a rank in at most ``max_bytes``; notes beyond that are counted and left out, except the last one.
    ``path``: of the file, which is made anew.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._file = Appended(path)
        self._max_bytes = max_bytes
        self._left_out = 0
        self._unwritten = b""
        self._summary = b""

    def add(self, note: dict[str, Any]) -> None:
        """Write one note now. If there is no room, count the note and write how many were left out instead.

        The first note is always written. After an OSError the note is kept, and `flush` writes it.
        """
        line = encode(note)
        held = self._file.final_bytes + len(self._unwritten)
        if held + len(line) > self._max_bytes and held:
            self._left_out += 1
            self._summary = encode({"note": "left_out", "at": note["at"], "count": self._left_out})
        else:
            self._unwritten += line
        self.flush()

    def flush(self) -> None:
        """Write the notes that an OSError has kept from being written, and the number of notes that were left out."""
        self._file.append(self._unwritten, self._summary)
        self._unwritten = b""

    def finish(self, last: dict[str, Any]) -> None:
        """Write ``last``, the last note, and the number of notes that were left out, even beyond the bound."""
        self._file.append(self._unwritten + encode({**last, "left_out": self._left_out}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _write_all_at(descriptor: int, data: bytes, at: int) -> None:
    """Write all of ``data`` at byte ``at`` of an open file; raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        at, view = at + written, view[written:]
