"""Ranks that compute different things, with collectives of the user's between the calls, train as one process."""

from __future__ import annotations

import pytest
import random_programs

from zero_comm import run_ranks

FIRST, COUNT, CHUNK = 1000, 400, 20


def wrong(seeds: range, world_size: int) -> dict[int, float]:
    """The seeds whose weights are not plain torch's on some rank."""
    by_rank = run_ranks(random_programs.deviations, world_size, seeds, timeout=300.0)
    return {seed: worst for found in by_rank for seed, worst in found.items() if not worst < 1e-11}


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_programs_train_as_one_process(world_size: int) -> None:
    assert wrong(range(8), world_size) == {}


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_random_programs_train_as_one_process(world_size: int) -> None:
    for first in range(FIRST, FIRST + COUNT, CHUNK):
        assert wrong(range(first, first + CHUNK), world_size) == {}
    print(f"{world_size} ranks: {COUNT} programs, 0 wrong")
