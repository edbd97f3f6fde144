"""Models whose losses, MLPs and norms run in tiles train under the engine as they do untiled in one process."""

from __future__ import annotations

import functools

import pytest
import tiled_runs
import training
from tiled_runs import Run, Trained

from zero_comm import run_ranks
from zero_comm.testing import RanksFailedError

STAGES = (0, 1, 2, 3)
ORACLE = 1e-12


@functools.cache
def trained(run: Run, stage: int, world_size: int) -> Trained:
    return run_ranks(tiled_runs.ranks, world_size, run, stage)[0]


def check(run: Run, stage: int, world_size: int) -> None:
    found = trained(run, stage, world_size)
    assert training.deviation(found.weights, tiled_runs.plain(run)) <= ORACLE


@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("tied", (False, True))
def test_training_in_tiles_follows_the_untiled_run(tied: bool, stage: int, world_size: int) -> None:
    check(Run(tied=tied), stage, world_size)


@pytest.mark.parametrize("tied", (False, True))
def test_stages_are_bitwise_equal(tied: bool) -> None:
    bits = [training.bits(trained(Run(tied=tied), stage, 2).weights) for stage in STAGES]
    assert all(one == bits[0] for one in bits)


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize(
    "run",
    (
        Run(inside=False),
        Run(inside=False, plain=True),
        Run(plain=True, recompute=True),
        Run(frozen=True, recompute=True),
        Run(tied=True, accumulation=2),
        Run(tiles=2, uneven=True),
    ),
    ids=str,
)
def test_losses_outside_plain_backwards_checkpointing_and_uneven_tiles(run: Run, stage: int) -> None:
    check(run, stage, 2)


def test_the_gradient_of_a_released_head_comes_once_and_is_reduced_once() -> None:
    found = trained(Run(), 3, 2)
    assert found.arrivals == Run().steps
    assert found.collectives == {"gather": 1, "reduce": 1}  # whatever the number of tiles; it stays for backward


def test_a_loss_outside_forward_needs_the_same_tiles_on_every_rank_at_stage_3() -> None:
    with pytest.raises(RanksFailedError, match="the ranks are at different calls"):
        trained(Run(tiles=2, inside=False, uneven=True), 3, 2)
