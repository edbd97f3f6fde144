"""Runs of the zoo with masters, moments, gradients, shards or activations on other tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training
import zoo
from training import Run

NVME_SMALL = {"buffer_count": 3, "ratio": 0.6}


def settings(run: Run, stage: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**training.config(run, stage, dist.get_world_size(), sub_group_size=4096, **zero), **more}


def build(run: Run) -> torch.nn.Module:
    return zoo.build(run.variant, training.DTYPES["fp32" if run.dtype in ("bf16", "fp16") else run.dtype])


def start(run: Run, stage: int, zero: dict[str, Any], **more: Any) -> Any:
    import zero_core

    return zero_core.initialize(model=build(run), config=settings(run, stage, zero, **more))[0]


def facts(engine: Any) -> dict[str, bytes]:
    """Every weight and every moment, whole, as bytes."""
    values = training.weights(engine)
    for name, p in engine.module.named_parameters():
        found = engine.partition.find(p)
        if found is not None and found[0].plan.trainable:
            values |= {f"{name}/{key}": engine.full_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
    return training.bits(values)


def trained(run: Run, stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    more = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}} if run.dtype == "fp16" else {}
    if more:
        run = run._replace(dtype="fp32")
        engine = start(run, stage, zero, data_types={}, **more)
    else:
        engine = start(run, stage, zero)
    losses: list[float] = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(run.steps):
        for micro in range(run.accumulation):
            loss = sum(engine(*zoo.batch(step, micro, rank, world_size)))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    result = {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "skipped": engine.skipped_steps,
        "facts": facts(engine),
    }
    engine.destroy()
    return result


def tiers(folder: Path, stage: int) -> dict[str, dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    found: dict[str, dict[str, Any]] = {
        "host": {"offload_optimizer": {"device": "cpu"}},
        "nvme": {"offload_optimizer": {**nvme, **NVME_SMALL}},
    }
    if stage == 3:
        found["host"]["offload_param"] = {"device": "cpu"}
        found["all nvme"] = {"offload_optimizer": nvme, "offload_param": {**nvme, "buffer_count": 3}}
    return found
