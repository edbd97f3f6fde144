"""Reading a record: from files, perhaps damaged, to arrays."""

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
_STEP_PREFIX = re.compile(rb'\{"step":(\d+)')
_RANK_FILE = re.compile(r"rank-(\d{5,})\.(?:notes|table|timeline)$")


class RecordError(Exception):
    """Raised if there is no record, or none that this version can read."""


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

    ``began``: Unix seconds. ``us``: microseconds of the step. ``left_out``: number of spans that were not recorded.
    ``memory``: pairs of microseconds and bytes by owner. ``open``: the step had not ended, nor had its last
    ``under_way`` spans.
    """

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

    ``head``: the first note. ``table``: columns by name, one number per row, NaN if it is missing; see
    `schema.COLUMNS`. ``notes``: the other notes, in the order of writing.
    """

    rank: int
    head: dict[str, Any]
    table: dict[str, Array]
    notes: list[dict[str, Any]]
    _bodies: dict[int, bytes] = field(default_factory=dict, repr=False)  # JSON of the timeline, by step

    @property
    def closed(self) -> bool:
        """Return whether the rank closed its record, as it does at the end of a run unless it is killed."""
        return any(note["note"] == "closed" for note in self.notes)

    @property
    def steps(self) -> list[int]:
        """The steps whose spans were kept, ascending; the last one may not have ended."""
        return sorted(self._bodies)

    def block(self, step: int) -> Block | None:
        """Return the spans of a step, parsed at every call; None if they were not kept."""
        body = self._bodies.get(step)
        return None if body is None else _parse_block(json.loads(body))

    def last_block(self) -> Block | None:
        """Return the spans of the newest step, which may not have ended; None if no spans were kept."""
        return self.block(max(self._bodies)) if self._bodies else None

    def has_memory(self, step: int) -> bool:
        """Return whether the rank recorded its memory in a step; False if the step was not kept."""
        return b'"memory":[[' in self._bodies.get(step, b"")

    def is_open(self, step: int) -> bool:
        """Return whether a step had not ended when the rank last wrote; False if the step was not kept."""
        return b'"open":true' in self._bodies.get(step, b"")[-64:]

    def open_block(self) -> Block | None:
        """Return the spans of the step that had not ended when the rank last wrote; None if there is no such step."""
        block = self.last_block()
        return block if block is not None and block.open else None

    def last_written_at(self) -> float:
        """Return the latest time in the rank's record, in Unix seconds; 0 if it is empty."""
        times = [float(note["at"]) for note in self.notes]
        if len(self.table["first"]):
            times.append(float(self.table["began"][-1] + self.table["seconds"][-1]))
        if (block := self.last_block()) is not None:
            times.append(block.began + block.us / 1e6)
        return max(times, default=0.0)


@dataclass
class Attempt:
    """One start of the run; ``ranks``: the records by rank, at least one."""

    number: int
    ranks: dict[int, RankRecord]

    @property
    def first(self) -> RankRecord:
        """The record of the lowest rank that wrote one."""
        return self.ranks[min(self.ranks)]

    @property
    def world_size(self) -> int:
        """The world size of the attempt, including ranks that wrote nothing."""
        return int(self.first.head.get("world_size", len(self.ranks)))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in the first rank's head: configuration, versions, machine."""
        facts = self.first.head.get("facts", {})
        return facts if isinstance(facts, dict) else {}

    def steps(self) -> list[int]:
        """Return the steps whose spans every rank of the record kept, ascending."""
        common = set.intersection(*(set(record.steps) for record in self.ranks.values()))
        return sorted(common)


@dataclass
class Run:
    """A record that was read.

    ``attempts``: in order, at least one. ``problems``: a sentence for each file or line that could not be read.
    ``failure``: the launcher's report of the last attempt's end (`failure.json`); None if there is none.
    """

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
        """The number of steps that a later attempt repeated, by the tables of each attempt's first rank."""
        tables = [attempt.first.table for attempt in self.attempts]
        firsts = [int(table["first"][0]) for table in tables if len(table["first"])]
        ends = [int(table["first"][-1] + table["steps"][-1]) for table in tables if len(table["first"])]
        return sum(max(0, end - first) for end, first in zip(ends, firsts[1:], strict=False))


def read_run(path: str | Path) -> Run:
    """Read the record in the folder ``path``; `Run.problems` names damaged and missing files and lines, which are left
    out.

    A report of a failure from before the last attempt is left out too. Raises `RecordError` if there is no record, or
    if its schema is newer than this package.
    """
    root = Path(path)
    problems: list[str] = []
    folders = sorted(folder for folder in root.glob("attempt-*") if folder.is_dir() and folder.name[8:].isdigit())
    attempts = [attempt for folder in folders if (attempt := _read_attempt(folder, problems)) is not None]
    if not attempts:
        detail = f": {'; '.join(problems)}" if problems else ""
        raise RecordError(
            f"{root}: expected a record, a folder with attempt-0000 and files such as rank-00000.table, found none"
            f'{detail}. Write one with "run_record": {{"path": "{root}"}} in the configuration'
        )
    failure = _read_failure(root / FAILURE_FILE, problems)
    began = float(attempts[-1].first.head.get("began", 0.0))
    if failure is not None and float(failure.get("at", began)) < began:
        failure = None  # the report of an earlier attempt
    return Run(root, attempts, problems, failure)


def _read_failure(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the content of `failure.json`; None if it does not exist, is no object or cannot be read.

    Only the last adds a sentence to ``problems``.
    """
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return None
    return value if isinstance(value, dict) else None


def _read_attempt(folder: Path, problems: list[str]) -> Attempt | None:
    """Return the attempt in a folder; None if it has no files of ranks.

    A sentence for damaged files, and one for ranks that wrote nothing, is added to ``problems``. Raises `RecordError`
    for a newer schema.
    """
    found = {int(match[1]) for path in folder.iterdir() if (match := _RANK_FILE.match(path.name))}
    ranks = {rank: _read_rank(folder, rank, problems) for rank in sorted(found)}
    if not ranks:
        return None
    attempt = Attempt(int(folder.name[8:]), ranks)
    missing = sorted(set(range(attempt.world_size)) - found)
    if missing:
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        problems.append(f"{folder.name}: {len(missing)} of {attempt.world_size} ranks wrote nothing: {names}")
    return attempt


def _read_rank(folder: Path, rank: int, problems: list[str]) -> RankRecord:
    """Return the record of a rank from its three files in an attempt's folder; damage is added to ``problems``.

    Raises `RecordError` for a newer schema.
    """
    notes = [note for body in _read_lines(folder / rank_file(rank, "notes"), problems) if (note := _parse_note(body))]
    head = notes.pop(0) if notes and notes[0]["note"] == "head" else {}
    if head.get("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
        raise RecordError(
            f"{folder}: written in schema {head['schema']}, this zero-report reads up to {SCHEMA_VERSION}; "
            "update it: pip install -U zero-report"
        )
    table = _parse_table(_read_lines(folder / rank_file(rank, "table"), problems))
    bodies = _read_lines(folder / rank_file(rank, "timeline"), problems)
    by_step = {int(match[1]): body for body in bodies if (match := _STEP_PREFIX.match(body))}
    return RankRecord(rank, head, table, notes, by_step)


def _read_lines(path: Path, problems: list[str]) -> list[bytes]:
    """Return the JSON of a file's undamaged lines; none if it cannot be read.

    A sentence about damage, or about a file that cannot be read, is added to ``problems``.
    """
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


def _parse_note(body: bytes) -> dict[str, Any] | None:
    """Return the note in the JSON of a line; None unless it is an object with a kind and a time."""
    value = json.loads(body)
    whole = isinstance(value, dict) and isinstance(value.get("note"), str) and isinstance(value.get("at"), (int, float))
    return value if whole else None


def _parse_table(bodies: list[bytes]) -> dict[str, Array]:
    """Return the columns of a table by name, with NaN for missing ones; ``bodies``: the JSON of its lines, of which the
    first is removed.

    If the line with the names is damaged, they are taken to be those of this version. Rows with another number of
    values are left out.
    """
    names = list(COLUMN_NAMES)
    if bodies and bodies[0].startswith(b'["'):
        names = [str(name) for name in json.loads(bodies.pop(0))]
    rows = json.loads(b"[" + b",".join(bodies) + b"]")
    values = np.array([row for row in rows if len(row) == len(names)], dtype=np.float64).reshape(-1, len(names))
    columns = {name: values[:, number] for number, name in enumerate(names)}
    return {**{name: np.full(len(values), np.nan) for name in COLUMN_NAMES}, **columns}


def _parse_block(value: dict[str, Any]) -> Block:
    """Return the spans of a step from the object of a line of the timeline."""
    names, flat = value["names"], value["spans"]
    return Block(
        step=value["step"],
        began=value["began"],
        us=value["us"],
        spans=tuple(_parse_spans(names, flat)),
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
