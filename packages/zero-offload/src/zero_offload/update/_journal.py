"""Updates out of place: the new states and weights of a shard are computed beside the old ones, and take their place
when it is known that they are right. A slice is the spans of fragments that are updated together; a kind is one tensor
of state: ``master``, a moment, or the scales of an 8-bit moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ._mirror import Mirror
from ._rules import Rule
from ._slices import FragmentSpan, Slice, StateKind, cut_slices, kinds_of
from ._staging import StagedSpan
from ._step import Tensors, run_kernels
from ._tiers import HostTier, SplitTier, Tier
from .plans import ShardPlan

__all__ = ["Journal", "chosen_shards", "journal_bytes"]

#: Elements that are copied and updated at a time: their states stay in a processor's last cache in between.
_CHUNK = 1 << 20


def journal_bytes(
    shard: ShardPlan, rule: Rule, groups: Sequence[Mapping[str, Any]], state_dtype: torch.dtype | None
) -> int:
    """Return the host memory, in bytes, for the new states and weights of one shard."""
    wanted = None if shard.dtype == torch.float64 else state_dtype
    states = sum(
        kind.nbytes(plan.numel)
        for plan in shard.fragments
        for kind in kinds_of(shard, rule.moments(groups[plan.group]), wanted)
    )
    return states + Mirror.bytes_of([shard])


def chosen_shards(shards: Sequence[ShardPlan], nbytes: Mapping[str, int], limit: int | None) -> list[ShardPlan]:
    """Return the shards, in order, that have a place in a journal of at most ``limit`` bytes (None: all of them).

    The last ones are chosen first: backward completes them first, and has the most time left then. ``nbytes``: the
    need of each shard, by name.
    """
    chosen: list[ShardPlan] = []
    room = sum(nbytes.values()) if limit is None else limit
    for shard in reversed(shards):
        if nbytes[shard.name] > room:
            break
        room -= nbytes[shard.name]
        chosen.append(shard)
    return chosen[::-1]


class _Place(NamedTuple):
    """Where the states of one span of a shard are: on a tier, by the index of the slice and the span's number in it;
    and in the journal, by the shard's index and the span's number there.
    """

    span: FragmentSpan
    tier: HostTier
    slice_index: int
    number: int
    own_index: int
    own_number: int


class Journal:
    """Host memory beside the states that ``tier`` keeps, of exactly the size of those of ``shards`` and their weights.

    ``slices``: those of the tier. Per shard: `compute`, from any one thread, which changes nothing but the journal;
    then `commit`, or nothing; then `install`. ``rule``: of the optimizer. ``pin``: the weights' memory is pinned.
    """

    def __init__(
        self, rule: Rule, shards: Sequence[ShardPlan], slices: Sequence[Slice], tier: Tier, *, pin: bool
    ) -> None:
        self._rule = rule
        where: dict[str, list[tuple[FragmentSpan, HostTier, int, int]]] = {shard.name: [] for shard in shards}
        for index, slice_ in enumerate(slices):
            found = tier.in_memory(index) if isinstance(tier, SplitTier) else (tier, index)
            for number, span in enumerate(slice_):
                own = where.get(span.fragment.shard.name)
                if own is not None and found is not None and isinstance(found[0], HostTier):
                    own.append((span, found[0], found[1], number))
        self._states = HostTier([tuple(span for span, *_ in own) for own in where.values()])
        self._places = {
            name: [_Place(*found, index, number) for number, found in enumerate(own)]
            for index, (name, own) in enumerate(where.items())
        }
        self._weights = Mirror()
        self._weights.allocate(shards, pin=pin)

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that the journal holds."""
        return self._states.memory()["states"] + self._weights.nbytes

    def __contains__(self, shard: object) -> bool:
        """Return whether the shard of this name has a place here."""
        return shard in self._places

    def compute(
        self,
        shard: str,
        groups: Sequence[Mapping[str, Any]],
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        grad_scale: float,
    ) -> None:
        """Compute the new states and weights of a shard whose fragments are all settled, with the options of
        ``groups`` and ``gradient`` (1-D, in host memory) times ``grad_scale``. ``weights``: those of the shard, in
        host memory, if they are updated in place; else None, and they are not read.
        """
        mirror = self._weights.borrow(shard)
        for chunk in self._chunks(shard):
            staged: list[StagedSpan] = []
            tensors: list[dict[str, torch.Tensor]] = []
            for number, (place, span) in enumerate(chunk):
                old = place.tier.tensors(place.slice_index, place.number)
                new = self._states.tensors(place.own_index, place.own_number)
                tensors.append({kind.name: _part(place, span, kind, new) for kind in span.fragment.kinds})
                for kind in span.fragment.kinds:
                    tensors[-1][kind.name].copy_(_part(place, span, kind, old))
                out = span.of_shard(mirror)
                if weights is not None:
                    out.view().copy_(span.of_shard(weights).view())
                staged.append(StagedSpan(number, span, span.of_shard(gradient), out, out))
            run_kernels(self._rule, groups, staged, tensors, grad_scale)

    def commit(self, shard: str) -> None:
        """Make the computed states of a shard those of the tier; the old ones become memory of the journal. Nothing is
        copied, and the weights stay where they are until `install`.
        """
        for place in self._places[shard]:
            new = self._states.tensors(place.own_index, place.own_number)
            old = place.tier.exchange(place.slice_index, place.number, new)
            self._states.exchange(place.own_index, place.own_number, old)

    def installed(self, shard: str, weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what is to be copied into ``weights``, a shard in the memory that forward reads, after `commit`:
        (target, source) of each span, 1-D.
        """
        mirror = self._weights.borrow(shard)
        spans = [place.span for place in self._places[shard]]
        return [(span.of_shard(weights).view(), span.of_shard(mirror).view()) for span in spans]

    def close(self) -> None:
        """Free the memory; other methods must not be called then."""
        self._places.clear()
        self._states.close()
        self._weights.close()

    def _chunks(self, shard: str) -> list[list[tuple[_Place, FragmentSpan]]]:
        """Return the spans of a shard in groups of at most `_CHUNK` elements, each with the place that it is in."""
        places = self._places[shard]
        chunks: list[list[tuple[_Place, FragmentSpan]]] = []
        position = 0
        for slice_ in cut_slices([place.span for place in places], _CHUNK):
            chunks.append([])
            for span in slice_:
                while not _is_within(span, places[position].span):
                    position += 1
                chunks[-1].append((places[position], span))
        return chunks


def _is_within(span: FragmentSpan, whole: FragmentSpan) -> bool:
    """Return whether ``span`` is a part of ``whole``."""
    return span.fragment is whole.fragment and whole.begin <= span.begin < whole.begin + whole.length


def _part(place: _Place, span: FragmentSpan, kind: StateKind, tensors: Tensors) -> torch.Tensor:
    """Return the items of ``kind`` of ``span``, a part of the place's span, as a view of the place's ``tensors``."""
    start = (span.begin - place.span.begin) // kind.block
    return tensors[kind.name][start : start + kind.items(span.length)]
