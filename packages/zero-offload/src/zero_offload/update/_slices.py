"""Layout of the states of each fragment, and the cutting of fragments into slices: no memory, no files.

A span is consecutive elements of a fragment; a slice is the spans that are loaded, updated and stored together. A kind
is one tensor of state of a fragment: ``master``, a moment, or the scales of an 8-bit moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .._memory import page_rounded
from .plans import FragmentPlan, ShardPlan, wide_dtype

__all__ = [
    "BLOCK",
    "FlatSpan",
    "FragmentSpan",
    "GRAIN",
    "KeptFragment",
    "MASTER",
    "Slice",
    "StateKind",
    "cut_slices",
    "kinds_of",
    "slice_bytes",
    "split_by_ratio",
]

#: Elements: fragments are cut at multiples of this, which is whole pages for every element type.
GRAIN = 4096
#: Elements that share one scale in 8-bit state.
BLOCK = 256
MASTER = "master"


@dataclass(frozen=True)
class StateKind:
    """One tensor that is kept for a fragment, with one item of ``dtype`` for every ``block`` elements.

    ``moment``: the moment it belongs to, of which 8-bit ones have two kinds, codes and scales; None for the master.
    ``second``: a second moment, never negative.
    """

    name: str
    dtype: torch.dtype
    moment: str | None = None
    second: bool = False
    block: int = 1

    def items(self, elements: int) -> int:
        """Return the number of items for ``elements`` elements: one per block, also for an incomplete one."""
        return -(-elements // self.block)

    def nbytes(self, elements: int) -> int:
        """Return the bytes of this kind of state for ``elements`` elements."""
        return self.items(elements) * self.dtype.itemsize


@dataclass(eq=False)
class KeptFragment:
    """A fragment at run time: its kinds of state, the number of updates so far (``step``), and which kinds the tier
    holds.

    ``has_moments`` and ``has_master``: the tier holds them. ``weights_changed``: the weights that forward reads were
    changed from outside, so the master is out of date. ``numbers``: what torch's optimizer keeps of the fragment
    besides (0-D tensors), if it steps on the host; empty before its first step. ``unwritten``: moments that were left
    out when others were written before the first step, and so have their initial value. ``keeps_master``: a master is
    needed, since the weights are not updated in place. ``dtype``: that of the update. ``moments``: the kinds that
    belong to moments.
    """

    plan: FragmentPlan
    shard: ShardPlan
    kinds: tuple[StateKind, ...]
    step: int = 0
    has_moments: bool = False
    has_master: bool = False
    weights_changed: bool = False
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    name: str = field(init=False)
    dtype: torch.dtype = field(init=False)  # of the update
    keeps_master: bool = field(init=False)  # the weights cannot be updated in place
    moments: tuple[StateKind, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Set the fields that follow from the plan, the shard and the kinds."""
        self.name = self.plan.name
        self.dtype = wide_dtype(self.shard.dtype)
        self.keeps_master = not self.shard.in_place
        self.moments = tuple(kind for kind in self.kinds if kind.moment is not None)

    @property
    def is_settled(self) -> bool:
        """Return whether the tier holds every kind of state and the master matches the weights that forward reads."""
        return self.has_moments and (self.has_master or not self.keeps_master) and not self.weights_changed

    def keeps(self, kind: StateKind, *, stale: bool = False) -> bool:
        """Return whether the tier holds a valid value of a kind. A master whose weights were changed from outside is
        not valid, but counts as valid with ``stale``.
        """
        if kind.moment is None:
            return self.has_master and (stale or not self.weights_changed)
        return self.has_moments

    def nbytes(self, elements: int) -> int:
        """Return the bytes of all kinds of state together for ``elements`` elements of the fragment."""
        return sum(kind.nbytes(elements) for kind in self.kinds)


class FlatSpan(NamedTuple):
    """Elements [start, start + length) of the flat tensor ``base``: kernels take addresses, which cost less than a
    view.
    """

    base: torch.Tensor
    start: int
    length: int

    def address(self) -> int:
        """Return the memory address of the first element, valid while ``base`` keeps its storage."""
        return self.base.data_ptr() + self.start * self.base.element_size()

    def view(self) -> torch.Tensor:
        """Return the span as a 1-D view of ``base``."""
        return self.base[self.start : self.start + self.length]


@dataclass(frozen=True)
class FragmentSpan:
    """Elements [begin, begin + length) of a fragment."""

    fragment: KeptFragment
    begin: int
    length: int

    def of_shard(self, shard: torch.Tensor) -> FlatSpan:
        """Return the elements of this span in ``shard``, a flat tensor with all elements of the fragment's shard."""
        return FlatSpan(shard, self.fragment.plan.start + self.begin, self.length)

    def of_kind(self, kind: StateKind, whole: torch.Tensor) -> torch.Tensor:
        """Return the items of this span as a view of ``whole``, a flat tensor with the fragment's items of ``kind`` for
        all its elements. The span must begin at a block of the kind.
        """
        start = self.begin // kind.block
        return whole[start : start + kind.items(self.length)]


Slice = tuple[FragmentSpan, ...]


def kinds_of(
    shard: ShardPlan, moments: Sequence[tuple[str, bool]], state_dtype: torch.dtype | None
) -> tuple[StateKind, ...]:
    """Return the kinds of state of every fragment in a shard: the master, unless the weights are updated in place, then
    the ``moments``, given as (name, whether it is a second moment).

    ``state_dtype`` of the moments: None for the dtype of the update, else bfloat16 or int8. An int8 moment has two
    kinds: a code for each element (uint8), and ``<moment>_scale``, a float32 for each block of 256 elements.
    """
    wide = wide_dtype(shard.dtype)
    kinds = [] if shard.in_place else [StateKind(MASTER, wide)]
    for moment, second in moments:
        if state_dtype == torch.int8:
            kinds.append(StateKind(moment, torch.uint8, moment, second))
            kinds.append(StateKind(f"{moment}_scale", torch.float32, moment, second, BLOCK))
        else:
            kinds.append(StateKind(moment, state_dtype or wide, moment, second))
    return tuple(kinds)


def split_by_ratio(
    fragments: Sequence[KeptFragment], ratio: float, grain: int
) -> tuple[list[FragmentSpan], list[FragmentSpan]]:
    """Return (spans of the first ``ratio`` (0 to 1) of all elements of the fragments, spans of the rest).

    A fragment that belongs to both is divided at a multiple of ``grain`` of its elements, at or below the exact
    fraction.
    """
    room = round(sum(fragment.plan.numel for fragment in fragments) * ratio)
    first: list[FragmentSpan] = []
    rest: list[FragmentSpan] = []
    for fragment in fragments:
        numel = fragment.plan.numel
        taken = numel if numel <= room else room - room % grain
        room -= min(numel, room)
        if taken:
            first.append(FragmentSpan(fragment, 0, taken))
        if numel > taken:
            rest.append(FragmentSpan(fragment, taken, numel - taken))
    return first, rest


def cut_slices(spans: Iterable[FragmentSpan], sub_group_size: int, shards: int | None = None) -> list[Slice]:
    """Return the spans, in order, as slices of at most ``sub_group_size`` elements (`GRAIN` or more), each from at most
    ``shards`` shards (None: any number).

    A span that does not fit into a slice is divided at a multiple of `GRAIN` elements.
    """
    slices: list[Slice] = []
    current: list[FragmentSpan] = []
    room = sub_group_size
    for span in spans:
        if shards is not None and len({s.fragment.shard.name for s in (*current, span)}) > shards:
            slices.append(tuple(current))
            current, room = [], sub_group_size
        begin, end = span.begin, span.begin + span.length
        while begin < end:
            length = min(end - begin, room)
            if begin + length < end:
                length -= length % GRAIN
            if length > 0:
                current.append(FragmentSpan(span.fragment, begin, length))
                begin += length
                room -= length
            if begin < end or room == 0:
                slices.append(tuple(current))
                current, room = [], sub_group_size
    return [*slices, tuple(current)] if current else slices


def slice_bytes(slice_: Slice) -> int:
    """Return the bytes that a slice's states take in a buffer, where every tensor is rounded up to whole pages."""
    return sum(page_rounded(kind.nbytes(span.length)) for span in slice_ for kind in span.fragment.kinds)
