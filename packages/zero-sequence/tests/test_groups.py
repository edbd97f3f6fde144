"""Which ranks share a sequence, and what is refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from sequence_ranks import failure_of
from torch.distributed.distributed_c10d import _world

from zero_comm import run_ranks
from zero_sequence import SequenceGroups


def places(size: int) -> dict[str, Any]:
    before = len(_world.pg_map)
    groups = SequenceGroups.open(size)
    told = {
        "sequence": dist.get_process_group_ranks(groups.get_sequence_parallel_group()),
        "data": dist.get_process_group_ranks(groups.get_data_parallel_group()),
        "all": dist.get_process_group_ranks(groups.get_sequence_data_parallel_group()),
        "model": dist.get_process_group_ranks(groups.get_model_parallel_group()),
        "numbers": (
            (groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()),
            (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()),
            (groups.get_sequence_data_parallel_rank(), groups.get_sequence_data_parallel_world_size()),
            (groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()),
        ),
    }
    groups.close()
    groups.close()
    told["left"] = len(_world.pg_map) - before
    return told


@pytest.mark.parametrize("size", [1, 2, 4])
def test_consecutive_ranks_share_a_sequence_and_equal_places_the_data(size: int) -> None:
    for rank, told in enumerate(run_ranks(places, 4, size)):
        number, place = divmod(rank, size)
        assert told["sequence"] == list(range(number * size, (number + 1) * size))
        assert told["data"] == list(range(place, 4, size))
        assert told["all"] == [0, 1, 2, 3]
        assert told["model"] == [rank]
        assert told["numbers"] == ((place, size), (number, 4 // size), (rank, 4), (0, 1))
        assert told["left"] == 0


def refused() -> list[str]:
    sizes = (3, 0, 8, 1 + dist.get_rank() % 2)
    return [failure_of(SequenceGroups.open, size) for size in sizes]


def test_a_size_that_does_not_divide_the_world_is_refused_on_every_rank() -> None:
    for three, none, eight, differing in run_ranks(refused, 4):
        for said, size in ((three, 3), (none, 0), (eight, 8)):
            expected = f"expected a divisor of the world size 4, one of [1, 2, 4], got {size}"
            assert said == f"SequenceError: sequence_parallel_size: {expected}"
        assert "expected the same on every rank, got [1, 2, 1, 2] by rank" in differing
