"""Gradual unfreezing: groups added after initialize are refused by name, and what the refusal says instead works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from torch import nn
from training import LR, Run, deviation

import zero_core
from zero_comm import run_ranks
from zero_partition import PartitionError

STAGES = (0, 1, 2, 3)


def late(model: Any) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


def plain() -> dict[str, torch.Tensor]:
    model = zoo.build("plain")
    joining = late(model)
    held = {id(p) for p in joining}
    for p in joining:
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in held], lr=LR, weight_decay=0.01)
    for step in range(4):
        if step == 2:
            for p in joining:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": joining, "lr": LR / 2})
        sum(model(*zoo.batch(step, 0))).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def unfreezes_as_told(stages: tuple[int, ...], zero: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in stages:
        model = zoo.build("plain")
        joining = late(model)
        held = {id(p) for p in joining}
        groups = [{"params": [p for p in model.parameters() if id(p) not in held]}, {"params": joining, "lr": LR / 2}]
        engine = zero_core.initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, lr=LR, weight_decay=0.01),
            config=training.config(Run(), stage, dist.get_world_size(), **(zero if stage else {})),
        )[0]
        for p in joining:
            p.requires_grad_(False)
        for step in range(4):
            if step == 2:
                for p in joining:
                    p.requires_grad_(True)
            training.train(engine, Run(), step, step + 1)
        found.append(training.weights(engine))
        engine.destroy(whole=False)
    return found


@pytest.mark.parametrize(
    ("world_size", "stages", "tier"),
    [
        (1, (1,), "cpu"),
        (2, STAGES, "device"),
        (3, (3,), "nvme"),
        *(pytest.param(n, STAGES, t, marks=pytest.mark.soak) for n in (1, 2, 3) for t in ("device", "cpu", "nvme")),
    ],
)
def test_parameters_frozen_until_their_turn_train_as_a_group_that_is_added_then(
    world_size: int, stages: tuple[int, ...], tier: str, tmp_path: Path
) -> None:
    expected = plain()
    where = {"device": tier} | ({"nvme_path": str(tmp_path)} if tier == "nvme" else {})
    zero = {} if tier == "device" else {"offload_optimizer": where}
    for found in run_ranks(unfreezes_as_told, world_size, stages, zero):
        for stage, weights in zip(stages, found, strict=True):
            assert deviation(weights, expected) <= 1e-12, stage


def adds(stages: tuple[int, ...]) -> list[Any]:
    found = []
    for stage in stages:
        model = zoo.build("plain")
        for p in late(model):
            p.requires_grad_(False)
        engine = training.start(Run(), stage, model)
        training.train(engine, Run(), 0, 1)
        before = training.weights(engine)
        texts = []
        for given in (late(model), [("w", nn.Parameter(torch.ones(2)))]):
            try:
                engine.optimizer.add_param_group({"params": given})
            except PartitionError as error:
                texts.append(str(error))
        training.train(engine, Run(), 1, 2)
        moved = deviation(training.weights(engine), before)
        engine.optimizer.param_groups.append({**engine.optimizer.param_groups[0], "params": late(model)})
        try:
            training.train(engine, Run(), 2, 3)
        except PartitionError as error:
            texts.append(str(error))
        engine.destroy(whole=False)
        found.append((texts, moved, "add_param_group" in engine.optimizer.__dict__))
    return found


def test_an_added_group_is_refused_by_name_and_training_goes_on() -> None:
    for found in run_ranks(adds, 2, STAGES):
        for texts, moved, left in found:
            assert "'blocks.1.norm.weight'" in texts[0] and "requires_grad_(False)" in texts[0]
            assert "shape (2,)" in texts[1] and "param_groups was changed" in texts[2]
            assert moved > 0 and not left
