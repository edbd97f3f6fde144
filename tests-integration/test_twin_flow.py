"""Twin-Flow: a share of the optimizer's states is updated by the CPU, the rest by torch's optimizer on the device."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import simulated_engines as engines
import torch
import twin_flow_runs as runs
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles
RATIOS = (0.0, 0.3, 0.7, 1.0)
WAITING = {(1, 0.3, 1), (2, 0.7, 2), (3, 0.0, 1), (3, 0.3, 2), (3, 1.0, 1)}
PLACES = [
    pytest.param(stage, ranks, marks=() if (stage, ranks) in {(1, 2), (2, 2), (3, 1)} else pytest.mark.soak)
    for stage in (1, 2, 3)
    for ranks in (1, 2)
]


@functools.cache
def runs_of(stage: int, world_size: int, dtype: str, ratio: float | None, steps: int) -> list[runs.TwinRun]:
    """Return each rank's run; float64 where ``dtype`` is "fp64"."""
    settings = runs.config(stage, dtype, ratio)
    return run_simulated(runs.trained, world_size, settings, steps, 1, None, dtype == "fp64")


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the values that are not equal bit by bit."""
    return [name for name, value in theirs.items() if not torch.equal(value, ours[name])]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "world_size"), PLACES)
def test_nothing_in_host_memory_gives_the_bits_of_no_offload(stage: int, world_size: int, dtype: str) -> None:
    here, there = (runs_of(stage, world_size, dtype, ratio, 5) for ratio in (0.0, None))
    for ours, theirs in zip(here, there, strict=True):
        assert ours.losses == theirs.losses
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-14)  # the ranks' sums are added in another order
        assert ours.skipped == theirs.skipped
        assert (theirs.skipped > 0) == (dtype == "fp16")
        assert different(ours.values, theirs.values) == []


@pytest.mark.parametrize("ratio", [0.3, 0.7])
@pytest.mark.parametrize(("stage", "world_size"), PLACES)
def test_each_element_has_the_bits_of_where_it_was_updated(stage: int, world_size: int, ratio: float) -> None:
    ours, on_host, on_device = (runs_of(stage, world_size, "bf16", r, 1)[0] for r in (ratio, 1.0, 0.0))
    only_host = only_device = 0
    for name, value in ours.values.items():
        as_host, as_device = value == on_host.values[name], value == on_device.values[name]
        assert bool((as_host | as_device).all()), name
        only_host += int((as_host & ~as_device).sum())
        only_device += int((as_device & ~as_host).sum())
    assert only_host > 0
    assert only_device > 0
    elements = (on_host.memory["states"]) // 12
    assert ours.memory["states"] == 12 * round(elements * ratio)
    gradients = ours.memory["device"] - 12 * (elements - round(elements * ratio))
    assert gradients + ours.memory["gradients"] == on_host.memory["gradients"]


@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(("stage", "world_size"), PLACES)
def test_every_ratio_follows_no_offload_in_float64(stage: int, world_size: int, ratio: float) -> None:
    here, there = (runs_of(stage, world_size, "fp64", r, 5) for r in (ratio, None))
    for ours, theirs in zip(here, there, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-12)
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-12)
        for name, value in theirs.values.items():
            torch.testing.assert_close(ours.values[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_steps_that_overflow_are_skipped_on_both_sides(ratio: float) -> None:
    here, there = (runs_of(2, 2, "fp16", r, 5) for r in (ratio, None))
    for ours, theirs in zip(here, there, strict=True):
        assert ours.skipped == theirs.skipped > 0
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "ratio", "micro_batches"),
    [
        pytest.param(*case, marks=() if case in WAITING else pytest.mark.soak)
        for case in itertools.product((1, 2, 3), RATIOS, (1, 2))
    ],
)
def test_host_waits_once_a_micro_batch_at_most_and_nothing_races(stage: int, ratio: float, micro_batches: int) -> None:
    settings = {**runs.config(stage, "bf16", ratio), "gradient_accumulation_steps": micro_batches}
    for rank in run_simulated(runs.trained, 2, settings, 11):
        assert [str(race) for report in rank.reports for race in report.races] == []
        assert [str(s) for report in rank.reports[9:] if len(report.stops) > micro_batches for s in report.stops] == []


@pytest.mark.soak
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("stage", "ratio"), [(1, 0.7), (2, 0.0), (3, 0.3)])
def test_no_delays_make_a_race(stage: int, ratio: float, delayed: bool) -> None:
    settings = runs.config(stage, "bf16", 1.0 if delayed else ratio)
    settings["offload"] = {"delayed_update": delayed}
    for first in range(0, 100, 10):
        assert run_simulated(engines.races_by_seed, 2, settings, range(first, first + 10)) == [[], []]


@pytest.mark.parametrize("more", [{"sub_group_size": 4096}, {"offload_param": {"device": "cpu"}}])
def test_slices_and_offloaded_parameters_change_no_bit(more: dict[str, Any]) -> None:
    plain = runs_of(3, 2, "bf16", 0.3, 4)
    for ours, theirs in zip(run_simulated(runs.trained, 2, runs.config(3, "bf16", 0.3, **more)), plain, strict=True):
        assert ours.losses == theirs.losses
        assert different(ours.values, theirs.values) == []


def test_parameters_in_host_memory_that_need_no_master_are_updated_on_the_device() -> None:
    more = {"offload_param": {"device": "cpu"}}
    here = run_simulated(runs.trained, 2, runs.config(3, "fp32", 0.0, **more))
    for ours, theirs in zip(here, runs_of(3, 2, "fp32", None, 4), strict=True):
        assert ours.losses == theirs.losses
        assert different(ours.values, theirs.values) == []


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)


def capturable(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1, capturable=True)


@pytest.mark.parametrize("optimizer", [sgd, adagrad, capturable])
def test_optimizers_of_the_script_step_there_as_without_offload(optimizer: Any) -> None:
    settings = [runs.config(2, "bf16", ratio) for ratio in (0.0, None)]
    for one in settings:
        del one["optimizer"]
    here, there = (run_simulated(runs.trained, 2, one, 4, 1, optimizer) for one in settings)
    for ours, theirs in zip(here, there, strict=True):
        assert ours.losses == theirs.losses
        assert different(ours.values, theirs.values) == []


@pytest.mark.parametrize("ratios", [(0.3, 0.3), (0.3, 1.0, 0.0, None), (None, 0.7, 0.3)])
def test_checkpoint_of_one_ratio_resumes_at_another(ratios: tuple[float | None, ...], tmp_path: Path) -> None:
    settings = [runs.config(2, "fp64", ratio) for ratio in ratios]
    whole = run_simulated(runs.trained, 2, settings[0], 2 * len(ratios), 1, None, True)
    for (losses, values), theirs in zip(run_simulated(runs.resumed, 2, settings, str(tmp_path)), whole, strict=True):
        assert losses == pytest.approx(theirs.losses, rel=1e-12)
        for name, value in theirs.values.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_can_be_read_and_changed(stage: int) -> None:
    ours, theirs = (run_simulated(runs.edited, 2, runs.config(stage, "fp32", ratio)) for ratio in (0.3, None))
    for (norms, values), (expected, expected_values) in zip(ours, theirs, strict=True):
        assert norms == pytest.approx(expected, rel=1e-6)
        for name, value in expected_values.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offload": {"state_dtype": "int8"}}, "moments in torch.int8"),
        ({"offload": {"state_dtype": "bf16"}}, "moments in torch.bfloat16"),
        ({"offload": {"delayed_update": True}}, "an update beside training"),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, "Lion"),
    ],
)
def test_what_only_host_memory_can_do_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    message = run_simulated(runs.refusal, 1, {**runs.config(2, "bf16", 0.5), **change})[0]
    assert "zero_optimization.offload_optimizer.ratio: expected 1 on sim" in message
    assert said in message
