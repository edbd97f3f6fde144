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
TOLERANCE = {"fp64": 1e-12, "bf16": 2e-6}  # masters in float32


def late(model: Any) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


def plain(dtype: str) -> dict[str, torch.Tensor]:
    """One process; in bf16 the optimizer has masters in float32."""
    model = zoo.build("plain", training.DTYPES["fp32" if dtype == "bf16" else dtype])
    masters = {n: nn.Parameter(p.detach().clone()) if dtype == "bf16" else p for n, p in model.named_parameters()}
    model.to(training.DTYPES[dtype])
    joining = late(model)
    held = {id(p) for p in joining}
    for p in joining:
        p.requires_grad_(False)
    names = {n: id(p) in held for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([masters[n] for n, is_late in names.items() if not is_late], lr=LR, weight_decay=0.01)
    for step in range(4):
        if step == 2:
            for p in joining:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": [masters[n] for n, is_late in names.items() if is_late], "lr": LR / 2})
        sum(model(*zoo.batch(step, 0))).backward()  # type: ignore[union-attr]
        for name, p in model.named_parameters():
            if masters[name] is not p and p.grad is not None:
                masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return {name: p.detach() for name, p in masters.items()}


def unfreezes_as_told(stages: tuple[int, ...], zero: dict[str, Any], dtype: str) -> list[dict[str, torch.Tensor]]:
    """In bf16 every rank has the whole batch, whose gradient is then the average, to the bit."""
    found = []
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dtype == "fp64" else (0, 1)
    for stage in stages:
        model = zoo.build("plain", training.DTYPES["fp32" if dtype == "bf16" else dtype])
        joining = late(model)
        held = {id(p) for p in joining}
        groups = [{"params": [p for p in model.parameters() if id(p) not in held]}, {"params": joining, "lr": LR / 2}]
        engine = zero_core.initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, lr=LR, weight_decay=0.01),
            config=training.config(Run(dtype=dtype), stage, dist.get_world_size(), **(zero if stage else {})),
        )[0]
        for p in joining:
            p.requires_grad_(False)
        for step in range(4):
            if step == 2:
                for p in joining:
                    p.requires_grad_(True)
            engine.backward(sum(engine(*zoo.batch(step, 0, rank, ranks))))
            engine.step()
        found.append(training.weights(engine))
        engine.destroy(unshard=False)
    return found


@pytest.mark.parametrize(
    ("world_size", "stages", "tier", "dtype"),
    [
        (1, (1,), "cpu", "fp64"),
        (2, STAGES, "device", "fp64"),
        (3, (3,), "nvme", "fp64"),
        (2, (0, 3), "device", "bf16"),
        (3, (1, 2), "cpu", "bf16"),
        (1, (3,), "nvme", "bf16"),
        *(
            pytest.param(n, STAGES, tier, dtype, marks=pytest.mark.soak)
            for n in (1, 2, 3)
            for tier in ("device", "cpu", "nvme")
            for dtype in ("fp64", "bf16")
        ),
    ],
)
def test_parameters_frozen_until_their_turn_train_as_a_group_that_is_added_then(
    world_size: int, stages: tuple[int, ...], tier: str, dtype: str, tmp_path: Path
) -> None:
    (expected,) = run_ranks(plain, 1, dtype)  # with one thread, as the engines
    where = {"device": tier} | ({"nvme_path": str(tmp_path)} if tier == "nvme" else {})
    zero = {} if tier == "device" else {"offload_optimizer": where}
    for found in run_ranks(unfreezes_as_told, world_size, stages, zero, dtype):
        for stage, weights in zip(stages, found, strict=True):
            assert deviation(weights, expected) <= TOLERANCE[dtype], stage


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
        engine.destroy(unshard=False)
        found.append((texts, moved, "add_param_group" in engine.optimizer.__dict__))
    return found


def test_an_added_group_is_refused_by_name_and_training_goes_on() -> None:
    for found in run_ranks(adds, 2, STAGES):
        for texts, moved, left in found:
            assert "'blocks.1.norm.weight'" in texts[0] and "requires_grad_(False)" in texts[0]
            assert "shape (2,)" in texts[1] and "param_groups was changed" in texts[2]
            assert moved > 0 and not left
