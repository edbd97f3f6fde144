"""torch_autocast: float32 masters, eligible weights gathered in the autocast dtype, and autocast's own numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import training
import zoo
from training import Run

from zero_comm import run_ranks

RUN = Run(steps=8, dtype="fp32", clip=0.1)


def autocast_ranks(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    import zero_core

    config = {**training.config(RUN, stage, dist.get_world_size()), "data_types": {}}
    config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    model = zoo.build("plain", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    engine = zero_core.initialize(model=model, optimizer=optimizer, config=config)[0]
    training.train(engine, RUN, 0, RUN.steps)
    return training.weights(engine), {unit.name: str(unit.plan.dtype) for unit in engine.partition.units}


def plain_autocast() -> dict[str, torch.Tensor]:
    model = zoo.build("plain", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LR, weight_decay=0.01)
    for step in range(RUN.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = sum(model(*zoo.batch(step, 0)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RUN.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_autocast_trains_as_torch_does_and_masters_stay_float32(stage: int) -> None:
    weights, _ = run_ranks(autocast_ranks, 1, stage)[0]
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert training.deviation(weights, plain_autocast()) <= 1e-6


def test_sharded_weights_are_gathered_in_the_autocast_dtype_without_changing_the_numbers() -> None:
    whole, dtypes = run_ranks(autocast_ranks, 2, 2)[0]
    sharded, sharded_dtypes = run_ranks(autocast_ranks, 2, 3)[0]
    assert set(dtypes.values()) == {"torch.float32"}
    assert set(sharded_dtypes.values()) == {"torch.float32", "torch.bfloat16"}
    assert training.deviation(sharded, whole) <= 1e-6
