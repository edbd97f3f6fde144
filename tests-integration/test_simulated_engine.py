"""The engine on the simulated accelerator: the CPU's weights, no race, one order of collectives on all ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import simulated_engines as engines
import torch
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles
SCHEDULES, CALL = 250, 10
"""Random schedules for each stage, and as many as one call answers in time on a busy machine."""
DEFAULT = {(0, 1, "fp32"), (1, 2, "fp32"), (3, 2, "bf16")}
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.soak)
    for case in itertools.product((0, 1, 2, 3), (1, 2, 4), ("fp32", "bf16"))
]


@pytest.mark.parametrize(("stage", "world_size", "dtype"), CASES)
def test_model_from_the_cpu_trains_as_there_without_a_race(stage: int, world_size: int, dtype: str) -> None:
    settings = engines.config(stage, dtype)
    ranks = run_simulated(engines.trained, world_size, settings, "sim", 1)
    there = run_simulated(engines.trained, world_size, settings, "cpu", 0)[0]
    for run in ranks:
        assert [str(race) for race in run.report.races] == []
        assert run.kept
        assert run.report.launches == ranks[0].report.launches
    assert ranks[0].losses == pytest.approx(there.losses, rel=1e-5)
    # Kernels of the CPU clip and step there, torch's here: their roundings differ by a step's last digits.
    for name, weight in there.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=0, atol=2e-6, msg=name)


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_delays_make_a_race(stage: int) -> None:
    for first in range(0, SCHEDULES, CALL):
        seeds = range(first, first + CALL)
        assert run_simulated(engines.races_by_seed, 2, engines.config(stage, "bf16"), seeds) == [[], []]


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        ("all_gather_into_tensor", "collective _ALLGATHER_BASE"),
        pytest.param("all_to_all_single", "collective ALLTOALL_BASE", marks=pytest.mark.soak),
    ],
)
def test_wait_that_the_engine_leaves_out_is_found(collective: str, name: str) -> None:
    for report in run_simulated(engines.with_wait_left_out, 2, collective):
        assert name in {race.first.operation for race in report.races}


@pytest.mark.parametrize(
    ("stage", "dtype", "keyword"),
    [(1, "fp32", "capturable"), (3, "bf16", "fused"), pytest.param(0, "bf16", "fused", marks=pytest.mark.soak)],
)
def test_optimizers_that_step_on_the_device_resume(stage: int, dtype: str, keyword: str, tmp_path: Path) -> None:
    for went_on, came_back in run_simulated(engines.resumed, 2, stage, dtype, keyword, str(tmp_path)):
        assert went_on == came_back


@pytest.mark.parametrize("keyword", ["fused", "capturable"])
def test_states_from_before_the_engine_come_to_the_device(keyword: str) -> None:
    ours, plain = run_simulated(engines.states_from_before, 1, keyword)[0]
    assert ours == pytest.approx(plain, rel=1e-5)


def test_optimizer_is_probed_where_it_steps() -> None:
    ranks = run_simulated(engines.with_optimizer_of_the_device, 2)
    assert all(losses[1] < losses[0] + 1 for losses in ranks)


def test_model_that_init_sharded_on_the_cpu_trains_on_the_device() -> None:
    for sharded, full in run_simulated(engines.built_by_init, 2):
        assert sharded == full


def test_init_sends_what_is_on_the_cpu_where_the_process_group_has_no_backend_for_it() -> None:
    assert all(
        0 < loss < 10 for losses in run_simulated(engines.initialised_for_the_device_alone, 2) for loss in losses
    )


def test_hooks_that_cannot_move_to_the_device_are_refused_by_name() -> None:
    assert "parameter 'head.weight' has hooks on its gradient" in run_simulated(engines.with_hook, 1)[0]
