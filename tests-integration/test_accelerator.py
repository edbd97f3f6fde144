"""The engine on a real accelerator: several ranks on one device, their messages through host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerator_runs as runs
import pytest
import simulated_engines as engines
import torch
import user_actions

from zero_comm import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
STAGES = (0, 1, 2, 3)


def settings_for(stage: int, dtype: str, **zero: Any) -> dict[str, Any]:
    settings = engines.config(stage, dtype, **zero)
    settings["optimizer"]["params"]["weight_decay"] = 0.01
    return settings


def tier(kind: str, folder: Path) -> dict[str, Any]:
    return {"device": kind, "pin_memory": True} | ({"nvme_path": str(folder)} if kind == "nvme" else {})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stages_train_as_plain_torch_on_the_device(dtype: str, world_size: int) -> None:
    plain = run_ranks(runs.trained_plainly, world_size, dtype, 0.5)
    for stage in STAGES:
        ours = run_ranks(runs.trained, world_size, settings_for(stage, dtype))
        for (losses, weights), (their_losses, their_weights) in zip(ours, plain, strict=True):
            assert losses == pytest.approx(their_losses, rel=1e-5 if dtype == "fp32" else 2e-3), stage
            off = sum(float((weights[n] - w).double().square().sum()) for n, w in their_weights.items())
            of = sum(float(w.double().square().sum()) for w in their_weights.values())
            assert off**0.5 < of**0.5 * (1e-6 if dtype == "fp32" else 2e-3), stage


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offloaded_states_and_shards_train_as_those_on_the_device(dtype: str, kind: str, tmp_path: Path) -> None:
    where = tier(kind, tmp_path)
    here = run_ranks(runs.trained, 2, settings_for(3, dtype))[0]
    for stage, zero in ((1, {}), (2, {}), (3, {}), (3, {"offload_param": where})):
        there = run_ranks(runs.trained, 2, settings_for(stage, dtype, offload_optimizer=where, **zero))[0]
        assert there[0] == pytest.approx(here[0], rel=1e-5 if dtype == "fp32" else 2e-3), stage


@pytest.mark.parametrize("keyword", ["fused", "capturable", "foreach"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_optimizers_that_step_on_the_device_resume(stage: int, keyword: str, tmp_path: Path) -> None:
    settings = engines.own_optimizer(stage, "bf16")
    for went_on, came_back in run_ranks(runs.resumed, 2, settings, keyword, str(tmp_path)):
        assert went_on == pytest.approx(came_back, rel=1e-5)


def test_checkpoints_move_between_stages_and_tiers(tmp_path: Path) -> None:
    went_on = run_ranks(runs.written, 2, settings_for(3, "bf16"), str(tmp_path / "c"))[0]
    for stage, zero in ((0, {}), (2, {}), (3, {}), (3, {"offload_optimizer": tier("cpu", tmp_path)})):
        came_back = run_ranks(runs.read, 2, settings_for(stage, "bf16", **zero), str(tmp_path / "c"))[0]
        assert came_back == pytest.approx(went_on, rel=2e-3), (stage, zero)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_of_one_rank_do_not_wait_for_the_device(dtype: str) -> None:
    found = {s: run_ranks(runs.stops_by_step, 1, settings_for(s, dtype), range(9, 12))[0] for s in STAGES}
    assert found == {stage: [{}, {}, {}] for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_not_finite_are_refused_or_skipped(stage: int) -> None:
    for raised, alone, _, message in run_ranks(runs.overflowing, 2, settings_for(stage, "bf16"), float("inf")):
        assert (raised in ([3], [4])) and (alone or raised == [3])
        assert "of step 3" in message
    scaled = settings_for(stage, "fp32") | {"fp16": {"enabled": True}}
    for raised, _, skipped, message in run_ranks(runs.overflowing, 2, scaled, float("inf")):
        assert (raised, message) == ([], "") and skipped >= 1


@pytest.mark.parametrize(
    "zero",
    [{"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 2}],
    ids=["qwZ", "qgZ", "hpZ"],
)
def test_compressed_communication_trains(zero: dict[str, Any]) -> None:
    exact = run_ranks(runs.trained, 2, settings_for(3, "bf16"))[0][0]
    ours = run_ranks(runs.trained, 2, settings_for(3, "bf16", **zero))[0][0]
    assert ours == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_learn_of_one_that_raises(stage: int, where: str) -> None:
    for message, seconds in run_ranks(runs.failed, 2, settings_for(stage, "bf16"), where):
        assert f"planted in {where}" in message
        assert seconds < 10


def test_memory_does_not_grow() -> None:
    for stage in (2, 3):
        for taken, retries in run_ranks(runs.memory_over, 2, settings_for(stage, "bf16"), 50):
            assert max(taken[5:]) - min(taken[5:]) < 1 << 16 and retries == 0


def test_activation_checkpoints_change_nothing() -> None:
    whole = run_ranks(runs.trained, 2, settings_for(3, "bf16"), 4)[0][0]
    assert run_ranks(runs.saved_activations, 2, settings_for(3, "bf16"))[0] == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_random_user_actions_do_what_they_do_in_plain_torch(world_size: int) -> None:
    seeds = range(1_200_000 + 1000 * world_size, 1_200_040 + 1000 * world_size)
    verdicts = run_ranks(user_actions.run_cases, world_size, seeds, torch.float64, "cuda:0", timeout=200)[0]
    assert [verdict for verdict in verdicts if verdict.wrong] == []
    assert len(verdicts) == len(seeds)
