"""How a unit's shards come together: over all ranks, or from the node's replica while it is fresh."""

from __future__ import annotations

import torch
from memory_groups import MemoryRank, run_threads

from zero_comm import Tag
from zero_partition.layout import UnitLayout
from zero_partition.route import Route, Secondary

LAYOUT = UnitLayout.from_shapes("u", {"a": [3], "b": [4]}, 2)


def gather_twice(rank: MemoryRank) -> tuple[list[float], list[str], list[str]]:
    route = Route(rank.gather, secondary=Secondary(rank.reduce, LAYOUT))  # type: ignore[arg-type]
    start, end = LAYOUT.shard_range(rank.rank)
    for step in range(2):
        flat = torch.zeros(LAYOUT.numel)
        flat[start:end] = torch.arange(start, end) + 1.0
        assert route.can_use_secondary(exact=False) == (step == 1)
        if route.can_use_secondary(exact=False):
            route.all_gather_secondary(flat, Tag("gather", "u", step)).wait()
        else:
            route.all_gather(flat, flat[start:end], Tag("gather", "u", step), exact=False).wait()
        route.arrived(flat)
    values, replica = flat.tolist(), route.secondary_shard
    assert replica is not None and replica.tolist() == values[start:end]
    route.weights_changed()
    assert not route.can_use_secondary(exact=False)
    return values, rank.gather.issued, rank.reduce.issued


def test_the_second_gather_comes_from_the_replica_until_the_weights_change() -> None:
    for values, over_all, inside in run_threads(gather_twice, 2):
        assert values == [float(n + 1) for n in range(LAYOUT.numel)]
        assert over_all == ["gather u"] and inside == ["gather u"]


def test_a_route_without_codec_or_replica_is_never_near_and_rounds_nothing() -> None:
    def check(rank: MemoryRank) -> None:
        route = Route(rank.gather)  # type: ignore[arg-type]
        assert not route.rounds and not route.can_use_secondary(exact=False) and route.secondary_shard is None

    run_threads(check, 1)
