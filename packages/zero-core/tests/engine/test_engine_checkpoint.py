"""Saving and loading what the user's loop needs to go on: groups, schedules, counters, client state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import RANKS, STAGES, build, config, outcome, train, weights
from torch import nn

import zero_core
from zero_comm import run_ranks


def engine_of(stage: int, how: str, model: nn.Module | None = None) -> zero_core.Engine:
    """Two param groups, and a schedule of this package or of torch."""
    model = model if model is not None else build()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, "lr": 5e-3},
    ]
    settings = config(stage)
    arguments: dict[str, Any] = {}
    if how == "ours":
        settings["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}}
    else:
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.01, 0.02], total_steps=10
        )
    return zero_core.initialize(model=model, model_parameters=groups, config=settings, **arguments)[0]


def bits(engine: zero_core.Engine) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in weights(engine).items()}


def save_and_go_on(folder: str, stage: int, how: str) -> dict[str, Any]:
    engine = engine_of(stage, how)
    train(engine, 0, 3)
    engine.optimizer.param_groups[1]["weight_decay"] = 0.25  # type: ignore[union-attr]
    engine.save_checkpoint(folder, client_state={"epoch": 2, "seen": [1, 2.5, "x", None]})
    first = train(engine, 3, 5), bits(engine), engine.get_lr()

    fresh = engine_of(stage, how, build(seed=1))
    path, client_state = fresh.load_checkpoint(folder)
    group = {k: v for k, v in fresh.optimizer.param_groups[1].items() if k != "params"}  # type: ignore[union-attr]
    counters = (fresh.global_steps, fresh.micro_steps, fresh.skipped_steps)
    second = train(fresh, 3, 5), bits(fresh), fresh.get_lr()
    return {"same": first == second, "client": client_state, "path": path, "group": group, "counters": counters}


@pytest.mark.parametrize("how", ("ours", "torch's"))
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_bitwise_with_groups_and_schedules(stage: int, how: str, tmp_path: Path) -> None:
    for seen in run_ranks(save_and_go_on, RANKS, str(tmp_path), stage, how):
        assert seen["same"] and seen["client"] == {"epoch": 2, "seen": [1, 2.5, "x", None]}
        assert seen["group"]["weight_decay"] == 0.25 and isinstance(seen["group"]["betas"], tuple)
        assert seen["counters"] == (3, 3, 0) and seen["path"].endswith("global_step3")


def save(folder: str, stage: int) -> dict[str, Any]:
    engine = engine_of(stage, "ours")
    train(engine, 0, 3)
    engine.save_checkpoint(folder, tag="mine", save_latest=False)
    return {"weights": bits(engine), "lr": engine.get_lr()}


def load(folder: str, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stage, "ours", build(seed=1))
    engine.load_checkpoint(folder, tag="mine", **options)
    state = engine.full_state(engine.module.head.weight, "exp_avg")
    return {
        "weights": bits(engine),
        "lr": engine.get_lr(),
        "state": bool(state.any()),
        "scheduler": engine.lr_scheduler.state_dict()["last_batch_iteration"],  # type: ignore[union-attr]
        "steps": engine.global_steps,
    }


@pytest.mark.parametrize(
    ("options", "state", "iteration", "steps"),
    [
        ({}, True, 2, 3),
        ({"load_optimizer_states": False}, False, 2, 3),
        ({"load_lr_scheduler_states": False}, True, -1, 3),
        ({"load_module_only": True}, False, -1, 0),
    ],
)
def test_parts_of_a_checkpoint_can_be_left_out(
    options: dict[str, Any], state: bool, iteration: int, steps: int, tmp_path: Path
) -> None:
    saved = run_ranks(save, RANKS, str(tmp_path), 3)[0]
    for seen in run_ranks(load, RANKS, str(tmp_path), 3, options):
        assert seen["weights"] == saved["weights"] and seen["state"] is state and seen["steps"] == steps
        assert seen["scheduler"] == iteration


def refused(folder: str) -> list[str]:
    engine = engine_of(1, "ours")
    return [
        outcome(lambda: engine.load_checkpoint(folder)),
        outcome(lambda: engine.load_checkpoint(folder, tag="no such tag")),
        outcome(lambda: engine.save_checkpoint("")),
        outcome(lambda: engine.save_checkpoint(folder, client_state={"model": build()})),
    ]


def test_a_checkpoint_that_is_not_there_or_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for messages in run_ranks(refused, RANKS, str(tmp_path)):
        assert all("Error" in message.split(":")[0] for message in messages), messages
        assert "no such tag" in messages[1] and "directory" in messages[2] and "client_state" in messages[3], messages
