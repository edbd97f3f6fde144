"""Reading a record: from files, perhaps damaged, to arrays.

A record has an attempt for each start of the run, and an attempt has a table, notes and a timeline for each rank; see
[Note: record format 1]. ``problems`` is a list to which functions add a sentence for each thing that cannot be read;
none of these raises an error unless it says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from . import lines
from .parsing import Array, Block, parse_block, parse_line, parse_table
from .schema import FAILURE_FILE, SCHEMA_VERSION, rank_file
from .shapes import failure_fault, is_head, is_note, load_json

_STEP_PREFIX = re.compile(rb'\{"step":(\d+)')
_RANK_FILE = re.compile(r"rank-(\d{5,})\.(?:notes|table|timeline)$")


class RecordError(Exception):
    """Raised if there is no record, or none that this version can read."""


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
        """Return the spans of a step; None if they were not kept, or their line is not laid out as the format says.
        They are parsed at every call."""
        body = self._bodies.get(step)
        return None if body is None else parse_block(body)

    def last_block(self) -> Block | None:
        """Return the spans of the newest step whose spans were kept; that step may not have ended. None as for `block`,
        and if no step was kept."""
        return self.block(max(self._bodies)) if self._bodies else None

    def has_memory(self, step: int) -> bool:
        """Return whether the rank recorded its memory in a step; False if the step was not kept."""
        return b'"memory":[[' in self._bodies.get(step, b"")

    def is_open(self, step: int) -> bool:
        """Return whether a step was still running when the rank last wrote; False if the step was not kept."""
        return b'"open":true' in self._bodies.get(step, b"")[-64:]

    def open_block(self) -> Block | None:
        """Return the spans of the step that was still running when the rank last wrote; None if there is no such
        step."""
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
        """The record of the lowest rank with rows in its table; if no rank has any, the record of the lowest rank."""
        return self._lowest(lambda record: len(record.table["first"]))

    @property
    def traced(self) -> RankRecord:
        """The record of the lowest rank with spans of steps; if no rank has any, the record of the lowest rank."""
        return self._lowest(lambda record: record.steps)

    @property
    def head(self) -> dict[str, Any]:
        """The first note, the head, of the lowest rank that has one; empty if none has. It is that rank's own dict."""
        return self._lowest(lambda record: record.head).head

    @property
    def world_size(self) -> int:
        """The world size of the attempt, including ranks that wrote nothing."""
        return int(self.head.get("world_size", len(self.ranks)))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts in `head`: configuration, versions, machine; empty if there are none."""
        facts = self.head.get("facts", {})
        return facts if isinstance(facts, dict) else {}

    def steps(self) -> list[int]:
        """Return, in ascending order, the steps whose spans all ranks kept; ranks without any spans do not count."""
        kept = [set(record.steps) for record in self.ranks.values() if record.steps]
        return sorted(set.intersection(*kept)) if kept else []

    def _lowest(self, has: Callable[[RankRecord], Any]) -> RankRecord:
        """Return the record of the lowest rank for which ``has`` returns a true value; if there is none, the record of
        the lowest rank."""
        ranks = sorted(self.ranks)
        return self.ranks[next((rank for rank in ranks if has(self.ranks[rank])), ranks[0])]


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

    @property
    def over(self) -> bool:
        """Return whether the run has ended: its launcher said how, or all ranks have closed their records."""
        return self.failure is not None or all(record.closed for record in self.last.ranks.values())

    @cached_property
    def replayed(self) -> int:
        """The number of steps that a later attempt repeated, by the table of each attempt's `Attempt.first`."""
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
    folders = _attempt_folders(root, problems)
    attempts = [attempt for folder in folders if (attempt := _read_attempt(folder, problems)) is not None]
    if not attempts:
        detail = f": {'; '.join(problems)}" if problems else ""
        raise RecordError(
            f"{root}: expected a record, a folder with attempt-0000 and files such as rank-00000.table, found none"
            f'{detail}. Write one with "run_record": {{"path": "{root}"}} in the configuration'
        )
    failure = _read_failure(root / FAILURE_FILE, problems)
    began = float(attempts[-1].head.get("began", 0.0))
    if failure is not None and float(failure.get("at", began)) < began:
        failure = None  # the report of an earlier attempt
    return Run(root, attempts, problems, failure)


def _attempt_folders(root: Path, problems: list[str]) -> list[Path]:
    """Return the folders ``attempt-NUMBER`` in ``root``, sorted by number; an empty list if ``root`` is no folder.
    Files of such names, and a folder that cannot be listed, are added to ``problems``."""
    try:
        found = [path for path in root.iterdir() if re.fullmatch(r"attempt-\d+", path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.append(f"{root}: cannot be read: {error.strerror}")
        return []
    found.sort(key=lambda path: int(path.name.rpartition("-")[2]))
    folders = [path for path in found if os.path.isdir(path)]
    problems += [f"{path.name}: expected a folder, got something else" for path in found if path not in folders]
    return folders


def _read_failure(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the content of ``path``, the launcher's `failure.json`; None if there is none. None also if it cannot be
    read or its values have other types than the format says, which is added to ``problems``."""
    try:
        value = load_json(lines.read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: cannot be read: {error}")
        return None
    if fault := failure_fault(value):
        problems.append(f"{path.name}: {fault}; it is left out")
        return None
    report: dict[str, Any] = value
    return report


def _read_attempt(folder: Path, problems: list[str]) -> Attempt | None:
    """Return the attempt in a folder; None if no rank has a file there, or the folder cannot be listed.

    Damaged files, and ranks that wrote nothing, are added to ``problems``. Raises `RecordError` for a newer schema.
    """
    try:
        found = {int(match[1]) for path in folder.iterdir() if (match := _RANK_FILE.match(path.name))}
    except OSError as error:
        problems.append(f"{folder.name}: cannot be read: {error.strerror}")
        return None
    ranks = {rank: _read_rank(folder, rank, problems) for rank in sorted(found)}
    if not ranks:
        return None
    attempt = Attempt(int(folder.name[8:]), ranks)
    if count := attempt.world_size - sum(rank < attempt.world_size for rank in found):
        missing = list(islice((rank for rank in range(attempt.world_size) if rank not in found), 8))
        names = ", ".join(map(str, missing)) + (f" and {count - 8} more" if count > 8 else "")
        problems.append(f"{folder.name}: {count} of {attempt.world_size} ranks wrote nothing: {names}")
    return attempt


def _read_rank(folder: Path, rank: int, problems: list[str]) -> RankRecord:
    """Return the record of a rank from its three files in an attempt's folder; damage in them is added to ``problems``.

    Raises `RecordError` for a newer schema.
    """
    files = {part: folder / rank_file(rank, part) for part in ("notes", "table", "timeline")}
    bodies = _read_lines(files["notes"], problems, begins_empty=False)
    parsed = [parse_line(body) for body in bodies]
    head: dict[str, Any] = parsed.pop(0) if parsed and is_head(parsed[0]) else {}
    if head.get("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
        raise RecordError(
            f"{folder}: written in schema {head['schema']}, this zero-report reads up to {SCHEMA_VERSION}; "
            "update it: pip install -U zero-report"
        )
    notes = [note for note in parsed if is_note(note) and note["note"] != "head"]
    _count_misshapen(files["notes"], len(parsed) - len(notes), len(bodies), problems)
    bodies = _read_lines(files["table"], problems, begins_empty=False)
    table, left_out = parse_table(bodies)
    _count_misshapen(files["table"], left_out, len(bodies), problems)
    bodies = _read_lines(files["timeline"], problems)
    steps = [(match, body) for body in bodies if (match := _STEP_PREFIX.match(body))]
    _count_misshapen(files["timeline"], len(bodies) - len(steps), len(bodies), problems)
    return RankRecord(rank, head, table, notes, {int(match[1]): body for match, body in steps})


def _count_misshapen(path: Path, count: int, lines_read: int, problems: list[str]) -> None:
    """Add a sentence to ``problems`` if ``count``, of ``lines_read`` undamaged lines of a file, are not laid out as the
    format says; nothing if it is 0."""
    if count:
        problems.append(
            f"{path.parent.name}/{path.name}: {count} of {lines_read:,} lines are whole but not laid out as the "
            f"format says; left out"
        )


def _read_lines(path: Path, problems: list[str], *, begins_empty: bool = True) -> list[bytes]:
    """Return the JSON of the undamaged lines of the file ``path``; an empty list if it cannot be read.

    Damage, and a file that cannot be read, is added to ``problems``; so is an empty file, unless ``begins_empty``, as
    the timeline does.
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
    elif not found.bodies and not begins_empty:
        problems.append(f"{path.parent.name}/{path.name}: is empty")
    return found.bodies
