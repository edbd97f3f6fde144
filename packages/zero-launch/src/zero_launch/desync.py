"""Explain why ranks hang: compare the collectives that each has started, and find the first that differs.

Each rank writes its collectives into a flight recorder (zero-comm's `flight_recorder.py`, [Note: flight
recorder format 1]). This file reads the recorders and compares them, entry by entry within each process group.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STALL_SECONDS = 2.0
"""Ranks that all wait, and among which nothing has moved for so long, may be deadlocked."""
_LOOK_SECONDS = 0.5
_HEADER = struct.Struct("<8sIIIIQQQQ")
_SLOT = struct.Struct("<QQqQd24s16s112s64s")
_HEADER_BYTES = 64
_RECENT = 256
_COUNTS = ("started", "finished", "waiting", "failed")


@dataclass(frozen=True)
class RecordedCollective:
    """One collective of one rank, as the rank's flight recorder has it.

    ``number``: in the order in which the rank started its collectives, from 1. ``sequence``: within its process
    ``group``. ``step``: the optimizer step; -1 for none. ``same_bytes``: its size, which every rank must have; 0 where
    sizes may differ. ``phase``: the kind of collective. ``name``: of the unit or parameter. ``site``: the line of code
    that asked for it, or empty.
    """

    number: int
    sequence: int
    step: int
    same_bytes: int
    group: str
    phase: str
    name: str
    site: str

    @property
    def what(self) -> tuple[str, str, int]:
        """Phase, name and bytes, which must be equal on every rank of the group."""
        return self.phase, self.name, self.same_bytes

    @property
    def ends_by_itself(self) -> bool:
        """True for the message by which a failed rank asks whether others failed too, as its wait has a time limit."""
        return (self.phase, self.name) == ("control", "failed")

    def __str__(self) -> str:
        size = f", {self.same_bytes} bytes" if self.same_bytes else ""
        site = f" at {self.site}" if self.site else ""
        step = f" in step {self.step}" if self.step >= 0 else ""
        return f"{self.phase} of '{self.name}'{step}{size}{site}"


@dataclass(frozen=True)
class FlightRecord:
    """The content of a rank's flight recorder.

    ``entries``: the newest collectives, oldest first. ``started``, ``finished``: how many the rank has started and
    finished. ``waiting``: the number of the one that it waits for. ``failed``: the number of the first whose wait
    failed since another's succeeded. Both are 0 for none.
    """

    entries: tuple[RecordedCollective, ...]
    started: int
    finished: int
    waiting: int
    failed: int = 0

    @property
    def awaited(self) -> RecordedCollective | None:
        """The collective in which the rank waits; None if it waits in none of the recent ones."""
        return self._entry(self.waiting)

    @property
    def last_awaited(self) -> RecordedCollective | None:
        """The collective whose wait ended with an error, unless a later wait succeeded; else `awaited`."""
        return self._entry(self.failed) or self.awaited

    def _entry(self, number: int) -> RecordedCollective | None:
        """Return the recent collective with that number; None if there is none."""
        return next((entry for entry in self.entries if entry.number == number), None)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data for a message: `entries` (a list of values for each) and the numbers by name;
        `from_json` is the inverse."""
        rows = [list(vars(entry).values()) for entry in self.entries]
        return {"entries": rows, **{name: getattr(self, name) for name in _COUNTS}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FlightRecord:
        """Return the record that `to_json` made into ``data``."""
        entries = tuple(RecordedCollective(*row) for row in data["entries"])
        return cls(entries, **{name: data[name] for name in _COUNTS})


def read_flight_record(path: Path) -> FlightRecord | None:
    """Return the content of one rank's flight recorder file, up to 256 entries; None if there is none, as before the
    rank first uses zero-comm. Entries that are being written over are left out.

    Raises ValueError for a file in another format, or too short for what its header says.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    header = data[: _HEADER.size].ljust(_HEADER.size, b"\0")
    magic, slots, slot_bytes, _, _, started, waiting, finished, failed = _HEADER.unpack(header)
    whole = slots > 0 and len(data) >= _HEADER_BYTES + slots * slot_bytes
    if magic != b"ZCRING01" or slot_bytes != _SLOT.size or not whole:
        raise ValueError(f"{path}: not a flight recorder in format 1")
    entries = []
    for number in range(max(1, started - min(slots, _RECENT) + 1), started + 1):
        row = _SLOT.unpack_from(data, _HEADER_BYTES + (number - 1) % slots * slot_bytes)
        if row[0] == number:  # else it is being written over
            sequence, step, same_bytes, _, *texts = row[1:]
            group, phase, name, site = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
            entries.append(RecordedCollective(number, sequence, step, same_bytes, group, phase, name, site))
    return FlightRecord(tuple(entries), started, finished, waiting, failed)


def difference(records: Mapping[int, FlightRecord]) -> str | None:
    """Return a text about the first collective that differs between ranks that started it; None if none differs.

    ``records``: by rank. Collectives with the same number in the same group are compared: they differ if their phase,
    name or bytes do. Control messages, with 0 bytes, are not compared.
    """
    tables = {rank: {(e.group, e.sequence): e for e in record.entries} for rank, record in records.items()}
    shared = [key for key in set().union(*tables.values()) if sum(key in table for table in tables.values()) > 1]
    differing = []
    for key in shared:
        found = {rank: table[key] for rank, table in tables.items() if key in table}
        # Control messages may differ; zero-comm compares them itself, and 0 bytes say so.
        if len({entry.what for entry in found.values() if entry.same_bytes}) > 1:
            differing.append((min(entry.number for entry in found.values()), key[1], found))
    if not differing:
        return None
    _, sequence, found = min(differing, key=lambda item: item[:2])
    return f"the ranks ask for different things in collective {sequence} of the same group:\n{_collective_lines(found)}"


def deadlocked(records: Mapping[int, FlightRecord]) -> bool:
    """Return whether ranks that all wait are deadlocked: each waits for a collective that some rank of its group has
    not started.

    ``records``: by rank. A collective that all have started may be a long transfer, after which they continue. The
    ranks of a group are taken to be the ranks that have used it.
    """
    asked: dict[str, dict[int, int]] = {}
    for rank, record in records.items():
        for entry in record.entries:
            asked.setdefault(entry.group, {})[rank] = entry.sequence
    for record in records.values():
        awaited = record.awaited
        if awaited is None or awaited.ends_by_itself or min(asked[awaited.group].values()) >= awaited.sequence:
            return False
    return True


def stall(records: Mapping[int, FlightRecord]) -> str:
    """Return a text about a deadlock: for each rank, the collective in which that rank waits, and the ranks that have
    not started this collective.

    ``records``: by rank, of ranks that are `deadlocked`.
    """
    awaited = {rank: record.awaited for rank, record in records.items()}
    lines = ["every rank waits for another, and none of them gets any further:"]
    for rank, entry in sorted(awaited.items()):
        if entry is None:
            continue
        others = [other for other in records if other != rank]
        missing = [r for r in others if not _has_started(entry, records[r])]
        note = f", which {ranks_text(missing)} did not ask for" if missing else ""
        lines.append(f"  rank {rank}: {entry}{note}")
    return "\n".join(lines)


def abandoned(records: Mapping[int, FlightRecord], ended: Collection[int], *, is_over: bool) -> str | None:
    """Return a text about ranks that wait in a collective which ranks that ended with status 0 never started; None if
    there are none.

    ``records``: by rank. ``ended``: the ranks with status 0. ``is_over``: the job has failed, so that a rank counts
    whose wait ended with an error; while the job runs, such a rank may continue. The ranks of a group are taken to be
    the ranks that have used it.
    """
    left: set[int] = set()
    lines = []
    for rank, record in sorted(records.items()):
        entry = record.last_awaited if is_over else record.awaited
        if rank in ended or entry is None or entry.ends_by_itself:
            continue
        used = [r for r in ended if r in records and any(e.group == entry.group for e in records[r].entries)]
        gone = [r for r in used if not _has_started(entry, records[r])]
        if gone:
            left.update(gone)
            lines.append(f"  rank {rank} {'waits' if entry is record.awaited else 'waited'} in {entry}")
    if not lines:
        return None
    return "\n".join([f"{ranks_text(sorted(left))} ended with exit status 0 while others wait for it:", *lines])


def _has_started(entry: RecordedCollective, record: FlightRecord) -> bool:
    """Return whether the rank of ``record`` has started the collective that is ``entry`` on another rank."""
    return any(other.group == entry.group and other.sequence >= entry.sequence for other in record.entries)


def _collective_lines(found: Mapping[int, RecordedCollective]) -> str:
    """Return a line for each different collective in ``found`` (by rank), with the ranks that have it."""
    alike: dict[str, list[int]] = {}
    for rank, entry in sorted(found.items()):
        alike.setdefault(str(entry), []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in alike.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 1, 2` for several."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Watcher:
    """Reads the flight recorders of this host's ranks. ``recorders``: rank -> file, which need not exist yet."""

    def __init__(self, recorders: Mapping[int, Path]) -> None:
        self._recorders = dict(recorders)
        self._looked_at = 0.0
        self._progress: dict[int, tuple[int, int]] = {}
        self._moved_at = time.monotonic()
        self.records: dict[int, FlightRecord] = {}
        """The records read last, by rank."""

    def read_if_due(self) -> bool:
        """Read the flight recorders if the last time is at least half a second ago; return whether that was done."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return False
        self._looked_at = now
        self.read()
        return True

    def read(self) -> None:
        """Read the flight recorders now, into ``records``; ranks without one are left out."""
        found = {rank: read_flight_record(path) for rank, path in self._recorders.items()}
        self.records = {rank: record for rank, record in found.items() if record is not None}
        progress = {rank: (record.started, record.finished) for rank, record in self.records.items()}
        if progress != self._progress:
            self._progress, self._moved_at = progress, time.monotonic()

    def step_of(self, rank: int) -> int | None:
        """Return the optimizer step of a rank's newest collective that has one, when last read; None without any."""
        record = self.records.get(rank)
        entries = () if record is None else record.entries
        return next((entry.step for entry in reversed(entries) if entry.step >= 0), None)

    @property
    def stalled(self) -> bool:
        """Return whether, when last read, every rank of this host waited in a collective, and none has started or
        finished one for `STALL_SECONDS`."""
        all_wait = len(self.records) == len(self._recorders) and all(record.waiting for record in self.records.values())
        return all_wait and time.monotonic() - self._moved_at > STALL_SECONDS


def explain(records: Mapping[int, FlightRecord], *, stalled: bool) -> str | None:
    """Return a text about why these ranks will not finish; None while they may, and for fewer than two records.

    ``records``: by rank. ``stalled``: these are all ranks of the job, all wait, and none has moved.
    """
    if len(records) < 2:
        return None
    return difference(records) or (stall(records) if stalled and deadlocked(records) else None)
