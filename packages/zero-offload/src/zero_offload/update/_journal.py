"""Updates out of place: the new states and weights of a shard are computed beside the old ones, and replace them when
it is known that they are right. A span is consecutive elements of a fragment; a slice is the spans that are updated
together; a kind is one tensor of state: ``master``, a moment, or the scales of an 8-bit moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_optim_kernels import default_threads, digests

from .._memory import PAGE, nbytes_of
from ._mirror import Mirror
from ._rules import Rule
from ._slices import FragmentSpan, Slice, kinds_of
from ._staging import StagedSpan
from ._step import run_kernels
from ._tiers import HostTier, SplitTier, Tier
from .plans import ShardPlan

__all__ = ["Journal", "chosen_shards", "journal_bytes"]

_DIGESTED = 1 << 18  # bytes that one digest is of
_TOUCHED = 1 << 22  # elements whose memory is asked for at a time


def journal_bytes(
    shard: ShardPlan, rule: Rule, groups: Sequence[Mapping[str, Any]], state_dtype: torch.dtype | None
) -> int:
    """Return the bytes of host memory that a journal needs for the new states and weights of one shard. ``rule``: of
    the optimizer; ``groups``: the parameter groups, by number; ``state_dtype``: of the moments, None for that of the
    update.
    """
    wanted = None if shard.dtype == torch.float64 else state_dtype
    states = sum(
        kind.nbytes(plan.numel)
        for plan in shard.fragments
        for kind in kinds_of(shard, rule.moments(groups[plan.group]), wanted)
    )
    return states + Mirror.bytes_of([shard])


def chosen_shards(shards: Sequence[ShardPlan], nbytes: Mapping[str, int], limit: int | None) -> list[ShardPlan]:
    """Return the shards, in order, that a journal of at most ``limit`` bytes holds (None: all of them).

    The last ones are chosen first: backward completes them first, and has the most time left then. ``nbytes``: the need
    of each shard, by name.
    """
    chosen: list[ShardPlan] = []
    room = sum(nbytes.values()) if limit is None else limit
    for shard in reversed(shards):
        if nbytes[shard.name] > room:
            break
        room -= nbytes[shard.name]
        chosen.append(shard)
    return chosen[::-1]


def _digests(weights: torch.Tensor) -> torch.Tensor:
    """Return a digest (int64) of each 256 KiB of ``weights`` (1-D, in host memory), in order, by which a later change
    of them is found.
    """
    nbytes = nbytes_of(weights)
    found = torch.empty(-(-nbytes // _DIGESTED), dtype=torch.int64)
    digests(weights.data_ptr(), found.data_ptr(), nbytes, block=_DIGESTED)
    return found


class _SpanLocation(NamedTuple):
    """Where the states of one ``span`` are: on ``tier``, by the index of the slice there and the span's ``number`` in
    it; and in the journal's own tier, by ``own_index`` and ``own_number``.
    """

    span: FragmentSpan
    tier: HostTier
    slice_index: int
    number: int
    own_index: int
    own_number: int


class Journal:
    """Computes the new states and weights of ``shards`` in host memory of its own, beside those that ``tier`` keeps.

    Call order per shard and step: `compute`, in one thread, which writes nothing but the journal; for weights that are
    updated in place `has_read`, which says whether the result still holds; then `commit`, after which the states are
    the tier's, and `pending_copies`, for the caller to copy the weights. A result is dropped by calling none of them;
    the next `compute` replaces it.

    The constructor reserves memory of exactly the size of the states and weights. What is not pinned becomes resident
    only in `touch` or when it is first written. ``rule``: of the optimizer. ``slices``: all of the tier; states of
    ``shards`` that the tier keeps in files are left out. ``pin``: the weights' memory is pinned. OSError if the system
    has not enough memory.
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
        self._locations = {
            name: [_SpanLocation(*found, index, number) for number, found in enumerate(own)]
            for index, (name, own) in enumerate(where.items())
        }
        self._read: dict[str, torch.Tensor] = {}
        self._stopped = False
        self._weights = Mirror()
        self._weights.allocate(shards, pin=pin)

    @property
    def nbytes(self) -> int:
        """Return the bytes of host memory that the journal holds."""
        return self._states.memory()["states"] + self._weights.nbytes

    def __contains__(self, shard: object) -> bool:
        """Return whether the shard of this name is one of the journal's."""
        return shard in self._locations

    def compute(
        self,
        shard: str,
        groups: Sequence[Mapping[str, Any]],
        gradient: torch.Tensor,
        weights: torch.Tensor | None,
        grad_scale: float,
    ) -> None:
        """Compute the new states and weights of a shard, whose states must all exist and match its weights. ``groups``:
        the parameter groups, by number. ``gradient`` (1-D, in host memory) is multiplied by ``grad_scale``.
        ``weights``: those of the shard, in host memory, if they are updated in place; else None, and the masters are
        read instead.
        """
        if weights is not None:
            self._read[shard] = _digests(weights)  # before they are read, so that a write since then is found
        mirror, staged = self._weights.borrow(shard), list[StagedSpan]()
        for number, (span, *_) in enumerate(self._locations[shard]):
            out = span.of_shard(mirror)
            read = out if weights is None else span.of_shard(weights)
            staged.append(StagedSpan(number, span, span.of_shard(gradient), out, read))
        old = [location.tier.tensors(location.slice_index, location.number) for location in self._locations[shard]]
        new = [self._states.tensors(location.own_index, location.own_number) for location in self._locations[shard]]
        threads = max(1, default_threads() - 1)  # one core is left to the thread that trains
        run_kernels(self._rule, groups, staged, old, grad_scale, results=new, threads=threads)

    def has_read(self, shard: str, weights: torch.Tensor) -> bool:
        """Return whether ``weights`` (1-D, in host memory), which are updated in place, are unchanged since the last
        `compute` of the shard has read them. This finds also writes past torch, for example through NumPy.
        """
        return self._read[shard].equal(_digests(weights))

    def commit(self, shard: str) -> None:
        """Make the computed states of a shard those of the tier; the memory of the old ones becomes the journal's.
        Nothing is copied, and the weights are not written yet; see `pending_copies`.
        """
        for location in self._locations[shard]:
            new = self._states.tensors(location.own_index, location.own_number)
            old = location.tier.exchange(location.slice_index, location.number, new)
            self._states.exchange(location.own_index, location.own_number, old)

    def reset(self) -> None:
        """Take back the memory that `commit` has given to the tier, also if a `commit` was interrupted; the caller
        resets the tier, too.
        """
        self._states.reset()

    def pending_copies(self, shard: str, weights: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the copies by which the caller publishes a shard's computed weights after `commit`: (target, source)
        for each span, 1-D. Targets are views of ``weights``, the shard in the memory that forward reads.
        """
        mirror = self._weights.borrow(shard)
        spans = [location.span for location in self._locations[shard]]
        return [(span.of_shard(weights).view(), span.of_shard(mirror).view()) for span in spans]

    def touch(self) -> None:
        """Make the system provide the journal's memory now, page by page, before the first `compute`, which would wait
        for that; end early after `stop_touching`.
        """
        for name, locations in self._locations.items():
            kept = [
                t
                for location in locations
                for t in self._states.tensors(location.own_index, location.own_number).values()
            ]
            for tensor in (*kept, self._weights.borrow(name)):
                for part in torch.split(tensor, _TOUCHED):
                    if self._stopped:
                        return
                    part[:: max(1, PAGE // tensor.element_size())].zero_()

    def stop_touching(self) -> None:
        """Make `touch`, which another thread may run, end after a few million further elements at most."""
        self._stopped = True

    def close(self) -> None:
        """Free the memory; other methods must not be called then."""
        self._locations.clear()
        self._read.clear()
        self._states.close()
        self._weights.close()
