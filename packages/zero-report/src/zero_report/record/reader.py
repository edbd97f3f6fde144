"""The reader's side: from files, perhaps damaged, to arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import lines
from .schema import COLUMN_NAMES, FAILURE_FILE, SCHEMA_VERSION, rank_file

Array = NDArray[np.float64]
_STEP = re.compile(rb'\{"step":(\d+)')
_RANK = re.compile(r"rank-(\d{5,})\.(?:notes|table|timeline)$")


class RecordError(Exception):
    """There is no record, or none that this version reads."""


class Span(NamedTuple):
    """One span of a step; times in microseconds from the begin of the rank's step."""

    kind: int
    name: str
    begin: int
    duration: int
    waited: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.begin + self.duration


@dataclass(frozen=True)
class Block:
    """The spans of one rank in one step. ``began``: Unix seconds; ``us``: microseconds of the step; ``open``: the
    step was not over, and the last ``under_way`` spans neither; ``memory``: microseconds, and bytes by owner."""

    step: int
    began: float
    us: int
    spans: tuple[Span, ...]
    left_out: int
    memory: tuple[tuple[int, dict[str, int]], ...]
    open: bool
    under_way: int = 0


@dataclass
class RankRecord:
    """The record of one rank in one attempt.

    ``table``: columns by name, one number per row, NaN where there is none. ``notes``: events in the order of writing.
    """

    rank: int
    head: dict[str, Any]
    table: dict[str, Array]
    notes: list[dict[str, Any]]
    _bodies: dict[int, bytes] = field(default_factory=dict, repr=False)

    @property
    def closed(self) -> bool:
        """Return whether the rank ended its record."""
        return any(note["note"] == "closed" for note in self.notes)

    @property
    def steps(self) -> list[int]:
        """Steps whose spans are there, in order."""
        return sorted(self._bodies)

    def block(self, step: int) -> Block | None:
        """Return the spans of a step; None where they were not kept."""
        body = self._bodies.get(step)
        return None if body is None else _block(json.loads(body))

    def last_block(self) -> Block | None:
        """Return the spans of the newest step, also of one that was not over."""
        return self.block(max(self._bodies)) if self._bodies else None

    def looked_at_memory(self, step: int) -> bool:
        """Return whether the rank looked at its memory in a step."""
        return b'"memory":[[' in self._bodies.get(step, b"")

    def is_open(self, step: int) -> bool:
        """Return whether a step was not over."""
        return b'"open":true' in self._bodies.get(step, b"")[-64:]

    def open_block(self) -> Block | None:
        """Return the spans of the step that was not over when the rank last wrote; None where there is none."""
        block = self.last_block()
        return block if block is not None and block.open else None

    def last_sign(self) -> float:
        """Return the Unix seconds of the last thing that the rank wrote."""
        times = [float(note["at"]) for note in self.notes]
        if len(self.table["first"]):
            times.append(float(self.table["began"][-1] + self.table["seconds"][-1]))
        if (block := self.last_block()) is not None:
            times.append(block.began + block.us / 1e6)
        return max(times, default=0.0)


@dataclass
class Attempt:
    """One start of the run; ``ranks`` by number."""

    number: int
    ranks: dict[int, RankRecord]

    @property
    def first(self) -> RankRecord:
        """The record of the lowest rank that wrote one."""
        return self.ranks[min(self.ranks)]

    @property
    def world_size(self) -> int:
        """Ranks that the attempt had."""
        return int(self.first.head.get("world_size", len(self.ranks)))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that the first rank gave at the start: configuration, versions, machine."""
        facts = self.first.head.get("facts", {})
        return facts if isinstance(facts, dict) else {}

    def steps(self) -> list[int]:
        """Steps of which every rank's spans are there."""
        common = set.intersection(*(set(record.steps) for record in self.ranks.values()))
        return sorted(common)


@dataclass
class Run:
    """A record. ``attempts`` in order, at least one; ``problems``: what could not be read, one sentence each;
    ``failure``: what a launcher left about the end (`failure.json`)."""

    path: Path
    attempts: list[Attempt]
    problems: list[str]
    failure: dict[str, Any] | None = None

    @property
    def last(self) -> Attempt:
        """The newest attempt."""
        return self.attempts[-1]

    @cached_property
    def replayed(self) -> int:
        """Steps that a later attempt did again."""
        tables = [attempt.first.table for attempt in self.attempts]
        firsts = [int(table["first"][0]) for table in tables if len(table["first"])]
        ends = [int(table["first"][-1] + table["steps"][-1]) for table in tables if len(table["first"])]
        return sum(max(0, end - first) for end, first in zip(ends, firsts[1:], strict=False))


def read_run(path: str | Path) -> Run:
    """Read the record in the folder ``path`` as far as it is whole.

    Raises `RecordError` where there is none, or where its schema is newer than this package.
    """
    root = Path(path)
    problems: list[str] = []
    folders = sorted(folder for folder in root.glob("attempt-*") if folder.is_dir() and folder.name[8:].isdigit())
    attempts = [attempt for folder in folders if (attempt := _attempt(folder, problems)) is not None]
    if not attempts:
        detail = f": {'; '.join(problems)}" if problems else ""
        raise RecordError(
            f"{root}: expected a record, a folder with attempt-0000 and files such as rank-00000.table, found none"
            f'{detail}. Write one with "run_record": {{"path": "{root}"}} in the configuration'
        )
    failure = _failure(root / FAILURE_FILE, problems)
    began = float(attempts[-1].first.head.get("began", 0.0))
    if failure is not None and float(failure.get("at", began)) < began:
        failure = None  # of an earlier start
    return Run(root, attempts, problems, failure)


def _failure(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return None
    return value if isinstance(value, dict) else None


def _attempt(folder: Path, problems: list[str]) -> Attempt | None:
    found = {int(match[1]) for path in folder.iterdir() if (match := _RANK.match(path.name))}
    ranks = {rank: _rank(folder, rank, problems) for rank in sorted(found)}
    if not ranks:
        return None
    attempt = Attempt(int(folder.name[8:]), ranks)
    missing = sorted(set(range(attempt.world_size)) - found)
    if missing:
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        problems.append(f"{folder.name}: {len(missing)} of {attempt.world_size} ranks wrote nothing: {names}")
    return attempt


def _rank(folder: Path, rank: int, problems: list[str]) -> RankRecord:
    notes = [note for body in _bodies(folder / rank_file(rank, "notes"), problems) if (note := _note(body))]
    head = notes.pop(0) if notes and notes[0]["note"] == "head" else {}
    if head.get("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
        raise RecordError(
            f"{folder}: written in schema {head['schema']}, this zero-report reads up to {SCHEMA_VERSION}; "
            "update it: pip install -U zero-report"
        )
    table = _table(_bodies(folder / rank_file(rank, "table"), problems))
    bodies = _bodies(folder / rank_file(rank, "timeline"), problems)
    by_step = {int(match[1]): body for body in bodies if (match := _STEP.match(body))}
    return RankRecord(rank, head, table, notes, by_step)


def _bodies(path: Path, problems: list[str]) -> list[bytes]:
    try:
        found = lines.read(path)
    except OSError as error:
        problems.append(f"{path.parent.name}/{path.name}: cannot be read: {error.strerror}")
        return []
    if found.damaged_lines:
        problems.append(
            f"{path.parent.name}/{path.name}: {found.damaged_lines} damaged or cut line"
            f"{'s' * (found.damaged_lines > 1)} ({found.damaged_bytes:,} bytes) left out, the other "
            f"{len(found.bodies):,} read"
        )
    return found.bodies


def _note(body: bytes) -> dict[str, Any] | None:
    value = json.loads(body)
    whole = isinstance(value, dict) and isinstance(value.get("note"), str) and isinstance(value.get("at"), (int, float))
    return value if whole else None


def _table(bodies: list[bytes]) -> dict[str, Array]:
    """Columns by name. A damaged first line leaves those of this version."""
    names = list(COLUMN_NAMES)
    if bodies and bodies[0].startswith(b'["'):
        names = [str(name) for name in json.loads(bodies.pop(0))]
    rows = json.loads(b"[" + b",".join(bodies) + b"]")
    values = np.array([row for row in rows if len(row) == len(names)], dtype=np.float64).reshape(-1, len(names))
    columns = {name: values[:, number] for number, name in enumerate(names)}
    return {**{name: np.full(len(values), np.nan) for name in COLUMN_NAMES}, **columns}


def _block(value: dict[str, Any]) -> Block:
    names, flat = value["names"], value["spans"]
    return Block(
        step=value["step"],
        began=value["began"],
        us=value["us"],
        spans=tuple(_spans(names, flat)),
        left_out=value["left_out"],
        memory=tuple((at, owners) for at, owners in value["memory"]),
        open=value.get("open", False),
        under_way=value.get("under_way", 0),
    )


def _spans(names: list[str], flat: list[int]) -> Iterator[Span]:
    for at in range(0, len(flat), 6):
        kind, name, begin, duration, waited, nbytes = flat[at : at + 6]
        yield Span(kind, names[name], begin, duration, waited, nbytes)
