"""The formulas of zero-plan against the engine's own bookkeeping, to the byte."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _wire_training import CONTEXT, PHASES, VOCABULARY, Transformer

import zero_core
from zero_comm import run_ranks
from zero_plan import Setup, StateBytes, collectives, link_bytes, model_states

ALIGNMENT = 64
"""Elements of which zero-partition's shards are multiples here."""
STEP = 4
"""Bytes of the optimizer's step number, one float32."""
CASES = [("bf16", 1), ("fp32", 3)]


def measure(stage: int, dtype: str, accumulation: int) -> dict[str, Any]:
    """What one rank sends in the third step and holds after it, and the elements of its units."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine = zero_core.initialize(model=Transformer(), config=config)[0]
    for step in range(3):
        engine.ledger.reset()
        for _ in range(accumulation):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            engine.backward(engine(torch.randint(VOCABULARY, (2, CONTEXT), generator=generator)))
            engine.step()
    found = {
        "sent": sum(engine.ledger.sent_bytes(phase) for phase in PHASES),
        "held": engine.memory_report(),
        "units": [unit.layout.used_numel for unit in engine.partition.units],
    }
    engine.destroy()
    return found


def all_measured() -> list[list[dict[str, Any]]]:
    return [[measure(stage, *case) for stage in range(4)] for case in CASES]


@functools.cache
def measured(world_size: int) -> list[list[list[dict[str, Any]]]]:
    return run_ranks(all_measured, world_size)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", range(4))
def test_states_and_bytes_sent_are_those_that_the_engine_counts(stage: int, world_size: int) -> None:
    for rank, answers in enumerate(measured(world_size)):
        for (dtype, accumulation), stages in zip(CASES, answers, strict=True):
            found = stages[stage]
            setup = Setup(
                stage,
                world_size,
                accumulation=accumulation,
                bytes=StateBytes.of(dtype),
                alignment=ALIGNMENT,
                averaged_bytes=4,
            )
            rows = {row.kind: row.nbytes for row in model_states(found["units"], setup, rank)}
            held = found["held"]
            assert held["gathered parameters"] + held["parameter shards"] == rows["parameters"]
            assert held["masters"] == rows["masters"]
            assert held["optimizer states"] == rows["moments"] + STEP
            assert stage >= 2 or held["gradients"] == rows["gradients"]
            assert found["sent"] == link_bytes(collectives(found["units"], setup, kept=0), setup).per_rank
