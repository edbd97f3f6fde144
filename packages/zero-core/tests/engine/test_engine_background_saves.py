"""Background saves hold the state at their call, and what they meet surfaces at a later step."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import RANKS, STAGES, bits, build, config, outcome, train
from torch import nn

import zero_core
from zero_ckpt import open_checkpoint
from zero_comm import run_ranks


def save_behind(folder: str, stage: int) -> dict[str, Any]:
    """Save while training continues; what is saved is the state at the call."""
    settings = {**config(stage), "checkpoint": {"writer": {"decoupled": True}}}
    engine = zero_core.initialize(model=build(), config=settings)[0]
    train(engine, 0, 2)
    saved = bits(engine)
    engine.save_checkpoint(folder)
    train(engine, 2, 4)
    fresh = zero_core.initialize(model=build(seed=1), config=settings)[0]
    engine.save_checkpoint(folder)
    after = bits(engine)
    path, _ = engine.load_checkpoint(folder, tag="global_step2")
    found = {"same": bits(engine) == saved, "path": path}
    engine.destroy()
    fresh.load_checkpoint(folder)
    return {**found, "newest": bits(fresh) == after, "steps": fresh.global_steps}


@pytest.mark.parametrize("stage", (0, 3))
def test_a_save_behind_training_holds_the_state_at_its_call(stage: int, tmp_path: Path) -> None:
    for seen in run_ranks(save_behind, RANKS, str(tmp_path), stage):
        assert seen["same"] and seen["newest"] and seen["steps"] == 4
        assert seen["path"].endswith("global_step2")


WIDE = 1 << 21
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}


def save_and_change(folder: Path, case: tuple[int, str, bool], decoupled: bool) -> None:
    """Two steps and a save, after each of two rounds; right behind the save all that can change changes."""
    stage, tier, bf16 = case
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": WIDE // 4}
    for key, section in TIERS[tier].items():
        if stage == 3 or (stage and key == "offload_optimizer"):
            zero[key] = {**section, **({"nvme_path": str(folder.parent)} if tier == "nvme" else {})}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "checkpoint": {"writer": {"decoupled": decoupled}},
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDE // 16), nn.Tanh(), nn.BatchNorm1d(WIDE // 16))
    engine = zero_core.initialize(model=model, config=settings)[0]
    x = torch.randn(2, 16, dtype=torch.bfloat16 if bf16 else torch.float32)
    for number in range(2):
        for _ in range(2):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.save_checkpoint(folder, tag=f"{number}")
        if stage < 3:
            for parameter in engine.module.parameters():
                parameter.data.add_(1.0)
        engine.backward(engine(x).float().square().mean())
        if number:
            engine.set_full_state(engine.module[0].weight, "exp_avg", torch.zeros(WIDE // 16, 16))
            engine.set_full_param(engine.module[0].weight, torch.ones(WIDE // 16, 16))
        engine.step()
    engine.destroy()


def behind_and_at_once(root: str, cases: list[tuple[int, str, bool]]) -> list[str]:
    """Cases in which a background save holds other bits than one that training waits for."""
    wrong = []
    for number, case in enumerate(cases):
        folders = [Path(root) / f"{number}" / how for how in ("behind", "at once")]
        folders[0].parent.mkdir(exist_ok=True)
        for folder in folders:
            save_and_change(folder, case, folder.name == "behind")
        for tag in ("0", "1") if dist.get_rank() == 0 else ():
            one, other = (open_checkpoint(folder, tag) for folder in folders)
            different = one.tensors.keys() ^ other.tensors.keys()
            different |= {key for key in one.tensors if one.read(*key) != other.read(*key)}
            if different or len(one.tensors) < 13:
                wrong.append(f"{case}, save {tag}: {sorted(different)} of {len(one.tensors)}")
    return wrong


REPRESENTATIVE = [(0, "device", False), (1, "nvme", True), (2, "device", True), (3, "cpu", False), (3, "device", True)]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, REPRESENTATIVE[1:4]),
        (2, REPRESENTATIVE),
        *(
            pytest.param(world_size, list(itertools.product(STAGES, TIERS, (False, True))), marks=pytest.mark.soak)
            for world_size in (1, 2, 3)
        ),
    ],
)
def test_what_is_copied_behind_training_has_the_bits_of_the_step(
    world_size: int, cases: list[tuple[int, str, bool]], tmp_path: Path
) -> None:
    assert run_ranks(behind_and_at_once, world_size, str(tmp_path), cases)[0] == []


def fail_behind(folder: str) -> tuple[list[str], list[str]]:
    settings = {**config(2), "checkpoint": {"writer": {"decoupled": True}}}
    engine = zero_core.initialize(model=build(), config=settings)[0]
    Path(folder).write_text("a file where the directory should be")
    engine.save_checkpoint(folder)
    failures = []
    for step in range(200):
        failures.append(outcome(lambda step=step: train(engine, step, step + 1)))  # type: ignore[misc]
        if failures[-1] != "no error":
            break
        time.sleep(0.01)
    after = [outcome(lambda: train(engine, 200, 202)), outcome(engine.destroy)]
    return failures[-1:], after


def test_what_a_save_behind_met_surfaces_at_a_later_step_and_training_goes_on(tmp_path: Path) -> None:
    for failures, after in run_ranks(fail_behind, RANKS, str(tmp_path / "taken")):
        assert "CheckpointError" in failures[0] and "taken" in failures[0], failures
        assert after == ["no error", "no error"], after
