"""A save or a read after user code has written one weight: the masters of all others keep their digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from zero_comm import run_ranks

WIDTH = 5
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "cpu", {}),
    (2, "nvme", {}),
    (3, "nvme", {}),
    (1, "cpu", {"offload": {"delayed_update": True}}),
    (3, "cpu", {"checkpoint": {"writer": {"decoupled": True}}}),
]


def made(stage: int, tier: str, more: dict[str, Any], folder: Path) -> zero_core.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).bfloat16()
    folder.mkdir(exist_ok=True)
    where = {"device": tier} | ({"nvme_path": str(folder)} if tier == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "offload_optimizer": where, "stage3_param_persistence_threshold": 10},
        "steps_per_print": 0,
        **more,
    }
    return zero_core.initialize(model=model, config=config)[0]


def full(engine: zero_core.Engine) -> list[torch.Tensor]:
    return [engine.full_param(parameter) for parameter in engine.module.parameters()]


def train(engine: zero_core.Engine) -> None:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    engine.backward(engine(x).square().mean())
    engine.step()


def edited(stage: int, tier: str, more: dict[str, Any], folder: str) -> list[str]:
    """What is not as it should be after an edit of one bias, a save, and a load into another engine."""
    engine = made(stage, tier, more, Path(folder, "first"))
    train(engine)
    before = full(engine)
    bias = engine.module[0].bias
    with engine.gathered(bias, modifier_rank=0):
        bias.data[: WIDTH - 1] *= 0.5
    engine.save_checkpoint(Path(folder, "saved"))
    after = full(engine)
    engine.save_checkpoint(Path(folder, "again"))  # waits for the first where that is written in the background
    other = made(stage, tier, more, Path(folder, "second"))
    other.load_checkpoint(Path(folder, "saved"))
    wrong = [] if all(map(torch.equal, after, full(other))) else ["loaded otherwise"]
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        kept = torch.equal(old, new) if number != 1 else old[-1] == new[-1] and bool((old[:-1] != new[:-1]).all())
        if not kept:
            wrong.append(f"parameter {number} has lost digits")
    for one in (engine, other):
        train(one)
        train(one)
    wrong += [] if all(map(torch.equal, full(engine), full(other))) else ["continues otherwise"]
    engine.destroy()
    other.destroy()
    return wrong


def all_edited(folder: str) -> dict[str, list[str]]:
    found = {}
    for number, (stage, tier, more) in enumerate(CASES):
        own = Path(folder, str(number))
        own.mkdir(exist_ok=True)
        found[f"stage {stage}, {tier}, {more}"] = edited(stage, tier, more, str(own))
    return {case: wrong for case, wrong in found.items() if wrong}


@pytest.mark.parametrize("world_size", (1, 2))
def test_masters_of_weights_that_were_not_written_keep_their_digits(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(all_edited, world_size, str(tmp_path)) == [{}] * world_size
