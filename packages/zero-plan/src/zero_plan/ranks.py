"""The ranks that a plan is for."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import PlanError, at_least_one


def chosen_ranks(world_size: int, ranks: Iterable[int] | None) -> tuple[int, ...]:
    """Return the ranks to plan for: ``ranks`` without duplicates. None for the first rank, whose shards are as large as
    any, and the last.

    Raises `PlanError` for no ranks, for a rank below 0 or not below ``world_size``, and for a ``world_size`` below 1.
    """
    at_least_one(world_size=world_size)
    chosen = tuple(dict.fromkeys((0, world_size - 1) if ranks is None else ranks))
    if not chosen:
        raise PlanError("ranks: expected at least one rank, got none")
    for rank in chosen:
        if not 0 <= rank < world_size:
            raise PlanError(f"ranks: expected ranks from 0 to {world_size - 1}, got {rank}")
    return chosen
