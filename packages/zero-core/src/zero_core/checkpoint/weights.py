"""Copies of the weights at the moment of a save, from which masters follow behind it.

[Note: masters follow behind] A write that leaves no trace (NumPy, DLPack) reaches a master only where all weights are
compared with it. A save does that for each, since it stores both. Behind training only the weights have to be copied
before `save` returns; comparing takes ten times as long, and is done by the thread that copies masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from zero_partition import Fragment, Unit


class CopiedWeights:
    """The weights of the units whose masters are apart from them in host memory, in memory that is kept.

    ``allow`` is called with bytes before they are allocated, and refuses them by raising. Call order: `copy` once
    nothing reads the copies of the save before; then `of` and `follow` on the thread that copies.
    """

    def __init__(self, allow: Callable[[int], object]) -> None:
        self._allow = allow
        self._copies: dict[int, torch.Tensor] = {}
        self._behind: set[int] = set()

    def copy(self, units: Sequence[Unit]) -> list[Unit]:
        """Copy the present weights; return the units whose masters have to follow at once instead."""
        found = {unit.index: weights for unit in units if (weights := unit.mastered) is not None}
        new = {index: weights for index, weights in found.items() if index not in self._copies}
        if new:
            self._allow(sum(weights.nbytes for weights in new.values()))
            self._copies |= {index: torch.empty_like(weights) for index, weights in new.items()}
        for index, weights in found.items():
            self._copies[index].copy_(weights)
        self._behind = set(found)
        return [unit for unit in units if unit.index not in found]

    def of(self, unit: Unit, rank: int) -> Iterator[tuple[Fragment, torch.Tensor]] | None:
        """The copies of the rank's fragments; None for a unit that has none."""
        copied = self._copies.get(unit.index)
        if copied is None:
            return None
        start, end = unit.layout.shard_range(rank)
        shard = copied[start:end] if copied.numel() == unit.layout.numel else copied
        return ((f, shard[f.shard_offset : f.shard_offset + f.length]) for f in unit.layout.fragments(rank))

    def follow(self, unit: Unit) -> None:
        """Have the unit's master follow its copied weights, once for each `copy`."""
        if unit.index in self._behind:
            self._behind.discard(unit.index)
            unit.follow(self._copies[unit.index])
