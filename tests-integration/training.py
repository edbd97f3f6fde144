"""Train the zoo in one process with plain torch, and on several ranks with the engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import zoo
from torch import nn

LR = 3e-3


class Run(NamedTuple):
    """What to train: the same fields describe the plain run and the engine's."""

    variant: str = "plain"
    steps: int = 50
    accumulation: int = 1
    clip: float = 0.0
    dtype: str = "fp64"
    reduce_each: bool = False
    backwards: int = 1


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def plain(run: Run, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """One process, torch.optim, the whole batch."""
    model = model if model is not None else zoo.build(run.variant, DTYPES[run.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step in range(run.steps):
        for micro in range(run.accumulation):
            losses = model(*zoo.batch(step, micro))
            sum(losses).div(run.accumulation).backward()  # type: ignore[union-attr]
        if run.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def config(run: Run, stage: int, world_size: int, **zero: Any) -> dict[str, Any]:
    """The engine's configuration of a run: many units, none persistent, small prefetch: everything moves."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": zoo.BATCH // world_size,
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": run.clip,
        "reduce_each_micro_batch": run.reduce_each,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 500,
            "unit_min_numel": 1,
            **zero,
        },
    }
    if run.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    else:
        settings["data_types"] = {"param_dtype": run.dtype}
    return settings


def offload(stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Where states, and at stage 3 shards, are kept: "device", "cpu" or "nvme", which takes ``folder``."""
    if tier == "device" or stage == 0:
        return {}
    where = {"device": tier} | ({"nvme_path": folder} if tier == "nvme" else {})
    return {"offload_optimizer": where} | ({"offload_param": where} if stage == 3 else {})


def start(run: Run, stage: int, model: nn.Module | None = None, **zero: Any) -> Any:
    """An engine for the run on this rank."""
    import zero_core

    model = model if model is not None else zoo.build(run.variant, DTYPES["fp32" if run.dtype == "bf16" else run.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    return zero_core.initialize(
        model=model, optimizer=optimizer, config=config(run, stage, dist.get_world_size(), **zero)
    )[0]


def train(engine: Any, run: Run, first: int, last: int) -> None:
    """Steps ``first`` to ``last`` of a run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        for micro in range(run.accumulation):
            losses = engine(*zoo.batch(step, micro, rank, world_size))
            if run.backwards == 1:
                engine.backward(sum(losses))
            else:
                for number, loss in enumerate(losses):
                    engine.backward(loss, retain_graph=number + 1 < len(losses))
            engine.step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter, whole, in the optimizer's precision."""
    found = engine.partition.find
    return {
        name: engine.full_param(p) if found(p) else p.detach().clone() for name, p in engine.module.named_parameters()
    }


def ranks(run: Run, stage: int, zero: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Train on this job's ranks; return rank 0's whole weights."""
    engine = start(run, stage, **(zero or {}))
    train(engine, run, 0, run.steps)
    result = weights(engine)
    engine.destroy()
    return result if dist.get_rank() == 0 else {}


def deviation(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all parameters."""
    assert ours.keys() == theirs.keys()
    return max(
        (float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours if ours[name].numel()),
        default=0.0,
    )


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The values' bytes, for bitwise comparison."""
    flat = {name: value.flatten() for name, value in values.items() if value.numel()}
    return {name: value.view(torch.uint8).numpy().tobytes() for name, value in flat.items()}
