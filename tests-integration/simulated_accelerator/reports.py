"""What happened on the device: stops of the host, races, collectives in the order of their launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of Python: the file, its number from 1, the function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True)
class Stop:
    """A place where the host waited for the device: for what, the lines of Python outside torch from the innermost
    one, and the autograd node that ran, if one did."""

    what: str
    place: tuple[Line, ...]
    node: str

    def __str__(self) -> str:
        return f"{self.what} at {_where(self.place, self.node)}"


@dataclass(frozen=True)
class Access:
    """One side of a race: the operator, the stream or the host, whether it writes, and where it was called."""

    operation: str
    by: str
    writes: bool
    place: tuple[Line, ...]
    node: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.operation} of {self.by} {verb} at {_where(self.place, self.node)}"


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes, one of them a write, that nothing orders; ``bytes`` of the first such overlap,
    ``count`` of the overlaps between these two places."""

    first: Access
    second: Access
    bytes: int
    count: int

    def __str__(self) -> str:
        return f"race over {self.bytes} bytes ({self.count} times):\n  {self.first}\n  {self.second}"


@dataclass(frozen=True)
class Launch:
    """A collective as the host launched it: the process group, the operation, the elements of its output.

    ``stream``: the stream that runs it, named as in `Access`; other ranks' streams have other names. ``behind``: the
    earlier collectives, by number in the order of launches, that have to be complete before it begins.
    """

    group: str
    operation: str
    elements: int
    stream: str = field(compare=False)
    behind: tuple[int, ...]


@dataclass
class Report:
    """What `watch` saw; complete when its context has ended."""

    stops: list[Stop]
    races: list[Race]
    launches: list[Launch]


def _where(place: tuple[Line, ...], node: str) -> str:
    lines = " < ".join(map(str, place)) or "no line of Python"
    return f"{lines}, in {node}" if node else lines


def lines(frames: list[tuple[str, int, str]]) -> tuple[Line, ...]:
    """Return the lines of what the device says of Python's frames."""
    return tuple(Line(*frame) for frame in frames)


def stops(told: list[tuple[str, list[tuple[str, int, str]], str]]) -> list[Stop]:
    """Return the stops of what the device says."""
    return [Stop(what, lines(frames), node) for what, frames, node in told]


def races(told: list[tuple[tuple[Any, ...], tuple[Any, ...], int, int]]) -> list[Race]:
    """Return the races of what the device says."""
    return [Race(_access(*first), _access(*second), size, count) for first, second, size, count in told]


def _access(operation: str, by: str, writes: bool, frames: list[tuple[str, int, str]], node: str) -> Access:
    return Access(operation, by, writes, lines(frames), node)
