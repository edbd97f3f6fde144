"""The host waits for the device in no step, and still learns what it has to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import simulated_engines as engines
import simulated_stops as stops
import torch
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles


def places(reports: list[stops.Report]) -> Counter[str]:
    """Count the stops by file and line."""
    return Counter(str(stop) for report in reports for stop in report.stops)


def test_gathers_do_not_read_placeholders() -> None:
    for reports in run_simulated(stops.by_step, 2, engines.config(3, "bf16"), range(4, 6)):
        assert not [place for place in places(reports) if "placeholder.py" in place and "issue_gather" in place]


@pytest.mark.parametrize(
    ("write", "trains"), [(stops.by_alias, True), (stops.by_detached, True), (stops.by_alias, False)]
)
def test_write_into_a_placeholder_is_refused_by_name(write: object, trains: bool) -> None:
    for message in run_simulated(stops.written_placeholder, 2, write, trains):
        assert "parameter 'blocks.1.up.weight' was written while it was released" in message


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_step_with_clipping_has_no_stop(stage: int, dtype: str, ahead: bool) -> None:
    for reports in run_simulated(stops.by_step, 2, engines.config(stage, dtype), range(9, 12), ahead):
        # a host that is a whole step ahead of its device waits for the norm of the step before
        others = [place for place in places(reports) if not (ahead and "(_learn_deferred)" in place)]
        assert others == []
        assert [str(race) for report in reports for race in report.races] == []


@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_has_no_stop(stage: int) -> None:
    settings = {**engines.config(stage, "bf16"), "gradient_accumulation_steps": 2}
    for reports in run_simulated(stops.by_step, 2, settings, range(9, 12)):
        assert places(reports) == Counter()


@pytest.mark.parametrize(("optimizer", "count"), [(stops.fused_sgd, 0), (stops.looped_sgd, 1)])
def test_optimizer_that_cannot_skip_by_itself_waits_once_a_step(optimizer: object, count: int) -> None:
    settings = engines.own_optimizer(3, "bf16")
    for reports in run_simulated(stops.by_step, 2, settings, range(9, 12), False, 1, optimizer):
        assert max(len(report.stops) for report in reports) <= count


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_next_step_raises_for_gradients_that_are_not_finite(stage: int, world_size: int) -> None:
    for found in run_simulated(stops.overflow, world_size, engines.config(stage, "bf16")):
        assert found.left_alone
        assert found.raised == [4]
        assert "the gradient norm of step 3 is nan" in found.message or "step 3 is inf" in found.message
        assert "belongs to unit 'root" in found.message


def test_save_raises_for_gradients_of_the_step_before_it_that_are_not_finite(tmp_path: object) -> None:
    for found in run_simulated(_saving_overflow, 2, engines.config(1, "bf16"), str(tmp_path)):
        assert found.raised == [3] and found.left_alone


def _saving_overflow(settings: dict[str, object], folder: str) -> stops.Overflow:
    return stops.overflow(settings, saves_in=folder)


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_that_are_skipped_where_they_are_not_finite_wait_once(stage: int) -> None:
    settings = engines.config(stage, "bf16")
    settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    for found in run_simulated(stops.overflow, 2, settings):
        assert (found.raised, found.skipped, found.left_alone) == ([], 1, True)
        assert found.stops[-1] <= 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_are_the_cpus_bit_by_bit_where_the_optimizer_is_the_same(stage: int, dtype: str) -> None:
    settings = engines.config(stage, dtype)
    settings["optimizer"]["params"]["torch_adam"] = True
    here = run_simulated(engines.trained, 2, settings, "sim", 1, 6)
    there = run_simulated(engines.trained, 2, settings, "cpu", 0, 6)
    for ours, theirs in zip(here, there, strict=True):
        assert ours.losses == theirs.losses
        assert [n for n, weight in theirs.weights.items() if not torch.equal(weight, ours.weights[n])] == []


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_norm_can_be_read_after_each_step(stage: int) -> None:
    here = run_simulated(stops.norms, 2, engines.config(stage, "fp32"), "sim")
    there = run_simulated(stops.norms, 2, engines.config(stage, "fp32"), "cpu")[0]
    assert here[0] == here[1] == pytest.approx(there, rel=1e-6)


OFFLOADED = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    "zero", [{"offload_optimizer": OFFLOADED}, {"offload_optimizer": OFFLOADED, "offload_param": OFFLOADED}]
)
def test_offloaded_states_wait_for_the_device_once_a_step_and_copy_pinned_memory(zero: dict[str, object]) -> None:
    for reports in run_simulated(stops.by_step, 2, engines.config(3, "bf16", **zero), range(9, 12)):
        assert not [place for place in places(reports) if "not pinned" in place]
        assert max(len(report.stops) for report in reports) <= 1  # for the norm, behind the gradients
        assert [str(race) for report in reports for race in report.races] == []


def test_gradients_go_to_files_through_pinned_memory(tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True}}
    for reports in run_simulated(stops.by_step, 2, engines.config(2, "bf16", **zero), range(9, 12)):
        assert not [place for place in places(reports) if "not pinned" in place or "blocking" in place]
        assert [str(race) for report in reports for race in report.races] == []


@pytest.mark.parametrize("stage", [1, 2])
def test_delayed_update_copies_beside_the_host(stage: int) -> None:
    settings = {**engines.config(stage, "bf16", offload_optimizer=OFFLOADED), "offload": {"delayed_update": True}}
    for reports in run_simulated(stops.by_step, 2, settings, range(9, 12)):
        assert not [place for place in places(reports) if "not pinned" in place or "blocking" in place]
        assert [str(race) for report in reports for race in report.races] == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_that_are_compared_are_waited_for_once(stage: int) -> None:
    for reports in run_simulated(stops.by_step, 2, engines.config(stage, "bf16"), range(6, 9)):
        assert max(len(report.stops) for report in reports) == 1
