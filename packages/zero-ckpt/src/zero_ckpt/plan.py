"""Decide which rank writes which elements. Pure arithmetic; every rank computes the same plan from the same input.

Elements that several ranks hold (replicas) are written once, by the candidate with the fewest bytes so far, in runs of
at most `MAX_SLICE_BYTES`. Elements in a sealed file (linked ones) are preferred to replicas in memory, cost nothing,
and are not split here. Elements that no rank holds are an error. All offsets and lengths are in elements of the
flattened tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .errors import CheckpointError
from .types import ITEMSIZE, numel

MAX_SLICE_BYTES = 8 << 20
"""A slice is the unit of checksumming, so a reader that needs part of one reads and verifies at most this much."""


@dataclass(frozen=True)
class Holding:
    """Elements that a rank can write: `index` is the interval's position in that rank's own list.

    `linked`: they lie in a file already, which becomes part of the checkpoint.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    length: int
    rank: int
    index: int
    linked: bool = False


@dataclass(frozen=True)
class PlannedSlice:
    """One slice to be written: `length` elements of a tensor from `offset` on, out of the rank's interval `index`."""

    index: int
    offset: int
    length: int


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save: `tensors` as (name, kind, shape, dtype), in the order in which ranks first named them, and
    `pieces`, by rank the slices that it writes.

    The slices of a rank are in order of interval and offset.
    """

    tensors: tuple[tuple[str, str, tuple[int, ...], str], ...]
    pieces: tuple[tuple[PlannedSlice, ...], ...]


@dataclass
class _Run:
    """Elements `begin` to `end` (exclusive) of a flattened tensor, which all `holders` hold."""

    begin: int
    end: int
    holders: tuple[Holding, ...]


def make_plan(holdings: Sequence[Holding], world_size: int, nodes: Sequence[str] | None = None) -> SavePlan:
    """Assign every element of every tensor to exactly one rank, or to one rank of each node that holds it.

    `holdings` are those of all ranks. `nodes` names each rank's node where nodes do not share a file system, None where
    they do. Raises CheckpointError when ranks disagree on a tensor's shape or dtype, when one rank holds an element
    twice, or when no rank holds some element.
    """
    tensors: dict[tuple[str, str], list[Holding]] = {}
    for holding in holdings:
        tensors.setdefault((holding.name, holding.kind), []).append(holding)
    load = [0] * world_size
    pieces: list[list[PlannedSlice]] = [[] for _ in range(world_size)]
    shared: list[_Run] = []
    for group in tensors.values():
        _require_same_shape(group)
        for run in _runs(group):
            if len(run.holders) == 1:
                _assign(run, run.holders[0], load, pieces)
            elif any(holder.linked for holder in run.holders):
                shared.append(run)
            else:
                shared.extend(_split_run(run))
    for run in sorted(shared, key=_run_nbytes, reverse=True):
        for holders in _holders_by_node(run, nodes):
            best = min(holders, key=lambda holding: (not holding.linked, load[holding.rank]))
            _assign(run, best, load, pieces)
    order = [sorted(own, key=lambda piece: (piece.index, piece.offset)) for own in pieces]
    heads = tuple((group[0].name, group[0].kind, group[0].shape, group[0].dtype) for group in tensors.values())
    return SavePlan(heads, tuple(tuple(own) for own in order))


def _holders_by_node(run: _Run, nodes: Sequence[str] | None) -> Collection[Sequence[Holding]]:
    """Return the holders of a run in groups, in each of which one holder writes the run: one group per node, or without
    `nodes` a single group.

    `nodes` names the node of each rank.
    """
    if nodes is None:
        return [run.holders]
    groups: dict[str, list[Holding]] = {}
    for holding in run.holders:
        groups.setdefault(nodes[holding.rank], []).append(holding)
    return groups.values()


def _require_same_shape(group: Sequence[Holding]) -> None:
    """Raise CheckpointError unless all of `group`, the ranks' holdings of one tensor, have the same shape and dtype."""
    first = group[0]
    for other in group:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{first.name!r} ({first.kind}) is {first.dtype} {first.shape} on rank {first.rank} "
                f"but {other.dtype} {other.shape} on rank {other.rank}"
            )


def _runs(group: Sequence[Holding]) -> list[_Run]:
    """Split a tensor into the longest runs of elements with the same holders, and return them in order; `group` are all
    ranks' holdings of the tensor.

    Raises CheckpointError for elements that no rank holds, or that a rank holds twice.
    """
    total = numel(group[0].shape)
    held = [holding for holding in group if holding.length]
    if len(held) == 1 and held[0].length == total:
        return [_Run(0, total, (held[0],))]
    marks: list[tuple[int, int, Holding]] = []
    for holding in held:
        marks.append((holding.offset, 1, holding))
        marks.append((holding.offset + holding.length, 0, holding))
    marks.sort(key=lambda mark: (mark[0], mark[1], mark[2].rank))
    runs: list[_Run] = []
    active: dict[int, Holding] = {}
    position = 0
    for at, opens, holding in marks:
        if at > position:
            if not active:
                raise _hole_error(group[0], position, at)
            runs.append(_Run(position, at, tuple(active[rank] for rank in sorted(active))))
            position = at
        if not opens:
            del active[holding.rank]
        elif active.setdefault(holding.rank, holding) is not holding:
            raise CheckpointError(
                f"{holding.name!r} ({holding.kind}): rank {holding.rank} contributes element {at} twice"
            )
    if position != total:
        raise _hole_error(group[0], position, total)
    return runs


def _hole_error(holding: Holding, begin: int, end: int) -> CheckpointError:
    """Return the error that no rank holds elements `begin` to `end` of a tensor; `holding` is any of the tensor's
    holdings."""
    return CheckpointError(
        f"{holding.name!r} ({holding.kind}, {holding.dtype} {holding.shape}): no rank contributes elements "
        f"{begin} to {end}"
    )


def _split_run(run: _Run) -> list[_Run]:
    """Split a run into consecutive runs of at most `MAX_SLICE_BYTES` each, with the same holders."""
    step = MAX_SLICE_BYTES // ITEMSIZE[run.holders[0].dtype]
    return [_Run(at, min(at + step, run.end), run.holders) for at in range(run.begin, run.end, step)]


def _run_nbytes(run: _Run) -> int:
    """Return the bytes of a run's elements."""
    return (run.end - run.begin) * ITEMSIZE[run.holders[0].dtype]


def _assign(run: _Run, holder: Holding, load: list[int], pieces: list[list[PlannedSlice]]) -> None:
    """Plan that `holder` writes `run`: append its slices to `pieces` of the holder's rank, and add its bytes to that
    rank's `load`. Both lists are by rank.

    A linked run is one slice and adds no bytes; others are split into slices of at most `MAX_SLICE_BYTES`.
    """
    load[holder.rank] += 0 if holder.linked else _run_nbytes(run)
    for part in [run] if holder.linked else _split_run(run):
        pieces[holder.rank].append(PlannedSlice(holder.index, part.begin, part.end - part.begin))
