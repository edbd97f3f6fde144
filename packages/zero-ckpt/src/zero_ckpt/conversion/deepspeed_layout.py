"""Where DeepSpeed puts which elements of which parameter: arithmetic without tensors.

Stages 1 and 2 lay the parameters of a group end to end and split the whole into one partition per rank; stage 3 splits
each parameter into one piece per rank, and each rank lays its pieces end to end, group by group. `names` and `numels`
are the names and numbers of elements of a group's parameters, in order; `ranks` is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

_PARTITION_MULTIPLE = 2
"""Elements at a multiple of which a partition begins."""
_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class ParameterRun:
    """`length` elements of parameter `name` from `offset` on, at element `begin` of a flat tensor."""

    name: str
    offset: int
    length: int
    begin: int


@dataclass(frozen=True)
class FlatGroup:
    """One rank's flat tensor of a group: its runs of parameters, its number of elements, and how many of these at its
    end are padding."""

    runs: tuple[ParameterRun, ...]
    numel: int
    padding: int


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """Return the names in the order of DeepSpeed's option `round_robin_gradients`: every `ranks`-th name, beginning
    with the first, then with the second, and so on."""
    return [name for first in range(min(ranks, len(names))) for name in names[first::ranks]]


def alignment_gaps(numels: Sequence[int], itemsize: int, *, aligned: bool) -> list[int]:
    """Return the elements of padding behind each parameter of a group under DeepSpeed's option `parameter_alignment`;
    all zero unless `aligned`. The last one is always 0.

    `itemsize`: bytes of an element of the weights.
    """
    multiple = _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, itemsize) if aligned else 1
    gaps, position = [], 0
    for numel in numels:
        gaps.append(-(position + numel) % multiple)
        position += numel + gaps[-1]
    return [*gaps[:-1], 0]


def partition_of_group(
    names: Sequence[str], numels: Sequence[int], gaps: Sequence[int], rank: int, ranks: int
) -> FlatGroup:
    """Return the partition of a group that `rank` holds at stages 1 and 2. `gaps`: elements of padding behind each
    parameter."""
    total = sum(numels) + sum(gaps)
    size = -(-total // (ranks * _PARTITION_MULTIPLE)) * _PARTITION_MULTIPLE
    first, runs, position = rank * size, [], 0
    for name, numel, gap in zip(names, numels, gaps, strict=True):
        low, high = max(position, first), min(position + numel, first + size)
        if low < high:
            runs.append(ParameterRun(name, low - position, high - low, low - first))
        position += numel + gap
    return FlatGroup(tuple(runs), size, max(0, min(size, first + size - total)))


def pieces_of_group(names: Sequence[str], numels: Sequence[int], rank: int, ranks: int) -> FlatGroup:
    """Return the flat tensor of the pieces of a group that `rank` holds at stage 3. Each piece is padded at its end;
    this padding is in the number of elements, but not in the count of padding, which is 0."""
    runs, begin = [], 0
    for name, numel in zip(names, numels, strict=True):
        size = -(-numel // ranks)
        length = max(0, min(size, numel - rank * size))
        if length:
            runs.append(ParameterRun(name, rank * size, length, begin))
        begin += size
    return FlatGroup(tuple(runs), begin, 0)


def sub_groups(names: Sequence[str], numels: Sequence[int], ranks: int, limit: int) -> Iterator[list[str]]:
    """Yield the parameter names of each sub-group of a group at stage 3. A sub-group is consecutive parameters, until
    they have `limit` elements or more on each rank."""
    sizes = [-(-numel // ranks) for numel in numels]
    if limit >= sum(sizes):
        yield list(names)
        return
    held, count = [], 0
    for name, size in zip(names, sizes, strict=True):
        held.append(name)
        count += size
        if count >= limit:
            yield held
            held, count = [], 0
    if held:
        yield held
