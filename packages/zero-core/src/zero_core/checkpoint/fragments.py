"""The fragments of a unit's shard and master: each fragment with a view of its elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zero_partition import Fragment, Unit, start_in_reduced


def shard_fragments(unit: Unit, shard: torch.Tensor, rank: int) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield the fragments of a unit's ``shard``, which ``rank`` owns, each with a 1-D view of its elements there."""
    for fragment in unit.layout.fragments(rank):
        yield fragment, shard[fragment.shard_offset : fragment.shard_offset + fragment.length]


def master_fragments(unit: Unit, ranks: range) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield each fragment of the shards of ``ranks`` with a 1-D view of its elements in this rank's master; nothing
    without one."""
    if unit.master is not None:
        for rank in ranks:
            for fragment in unit.layout.fragments(rank):
                start = start_in_reduced(unit, fragment)
                yield fragment, unit.master[start : start + fragment.length]


def has_own_master(unit: Unit) -> bool:
    """Return whether this rank has a master of the unit in another dtype than the weights."""
    return unit.master is not None and unit.master.dtype != unit.plan.dtype
