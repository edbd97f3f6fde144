"""An engine that nobody holds any more leaves nothing behind, destroyed or not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import zero_core


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_and_a_model_that_nobody_holds_are_collected(stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = zero_core.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    remaining = [weakref.ref(engine), weakref.ref(model), weakref.ref(optimizer)]
    del engine, model, optimizer
    gc.collect()
    assert [reference() for reference in remaining] == [None, None, None]
