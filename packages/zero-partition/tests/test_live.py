"""Counted elements are those of units that are gathered or on their way, whatever happens to them."""

from __future__ import annotations

import random

from memory_groups import MemoryRank, run_threads

from zero_partition.live import UnitState
from zero_partition.unit import Unit


def counted(units: list[Unit]) -> tuple[int, int]:
    """What a walk through all units finds."""
    coming = sum(u.layout.numel for u in units if u.state is UnitState.GATHERING)
    return coming, sum(u.layout.numel for u in units if u.releasable and u.state is not UnitState.RELEASED)


def walk(rank: MemoryRank, seed: int) -> None:
    """Gather, wait for, lend, give up and release units in a random order, the same on every rank."""
    rng = random.Random(seed)
    units = [rank.unit(index, width=2 + index, releasable=index != 1) for index in range(4)]
    assert (rank.live.coming, rank.live.live) == counted(units) == (0, 0)
    for number in range(60):
        unit = rng.choice(units)
        action = rng.choice(("issue", "issue", "wait", "release", "hand over", "pin", "drop"))
        if action == "issue":
            unit.issue_gather(number)
        elif action == "wait":
            unit.wait_gather()
        elif action == "release":
            unit.release()
        elif action == "hand over":
            unit.release_keeping_views()
        elif action == "drop":
            unit.drop_gather(keep_edits=rng.random() < 0.5)
        elif unit.pinned:
            unit.unpin()
        else:
            unit.pin()
        assert (rank.live.coming, rank.live.live) == counted(units), (number, action, unit.index)


def test_counts_are_those_of_a_walk_through_all_units() -> None:
    for seed in range(5):
        run_threads(walk, 2, seed)
