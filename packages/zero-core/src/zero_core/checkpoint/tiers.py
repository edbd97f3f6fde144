"""What tiers keep, as named intervals of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from zero_ckpt import Checkpoint, Interval
from zero_ckpt.torch import dtype_name, tensor_buffer, torch_dtype
from zero_partition import Fragment, Residency, StateTier, Unit

from .reading import Reading


def stored_weights(store: Residency, unit: Unit, rank: int) -> Iterator[Interval]:
    """This rank's part of a unit's weights, read from its store when its turn comes to be written."""

    def read(fragment: Fragment) -> Any:
        shard = store.acquire(unit.name)
        copied = shard[fragment.shard_offset : fragment.shard_offset + fragment.length].to("cpu", copy=True)
        store.release(unit.name, dirty=False)
        return tensor_buffer(copied)

    for fragment in unit.layout.fragments(rank):
        entry = fragment.entry
        yield Interval(
            entry.name,
            "param",
            entry.shape,
            dtype_name(unit.plan.dtype),
            fragment.param_offset,
            partial(read, fragment),
            fragment.length,
        )


def tier_intervals(tier: StateTier, unit: Unit, rank: int, *, replicas: bool = False) -> Iterator[Interval]:
    """What a tier keeps for a unit, one parameter in memory at a time; ``replicas``: also what other ranks have too."""
    kept: dict[str, dict[str, torch.Tensor]] = {}

    def read(name: str, kind: str) -> Any:
        if name not in kept:
            kept.clear()
            kept.update(tier.states([name]))
        return tensor_buffer(kept[name][kind])

    for fragment in unit.layout.fragments(rank):
        entry = fragment.entry
        for _, state in tier.states([entry.name]):
            for kind, value in state.items():
                if value.dim():
                    yield Interval(
                        entry.name,
                        kind,
                        entry.shape,
                        dtype_name(value.dtype),
                        fragment.param_offset,
                        partial(read, entry.name, kind),
                        fragment.length,
                    )
                elif fragment.param_offset == 0 or replicas:
                    yield Interval(entry.name, f"{kind}.scalar", (), dtype_name(value.dtype), 0, tensor_buffer(value))


def tier_values(
    unit: Unit, tier: StateTier, checkpoint: Checkpoint, rank: int, *, optimizer: bool
) -> dict[str, dict[str, Any]]:
    """What a checkpoint has of a unit for its tier; without ``optimizer`` the masters alone."""
    found: dict[str, dict[str, Any]] = {}
    reading = Reading(checkpoint)
    steps: dict[str, torch.Tensor] = {}
    for fragment in unit.layout.fragments(rank):
        name, offset = fragment.entry.name, fragment.param_offset
        if (name, "param") not in checkpoint.tensors:
            continue
        state: dict[str, Any] = {}
        for kind in tier.kinds(name):
            if kind == "master":
                state[kind] = torch.empty(fragment.length, dtype=torch.promote_types(unit.plan.dtype, torch.float32))
                reading.add_weights(name, offset, state[kind])
            elif optimizer and (name, kind) in checkpoint.tensors:
                state[kind] = torch.empty(fragment.length, dtype=torch_dtype(checkpoint.tensors[name, kind].dtype))
                reading.add(name, kind, offset, state[kind])
        if optimizer and (name, "step.scalar") in checkpoint.tensors:
            steps[name] = torch.empty(1, dtype=torch_dtype(checkpoint.tensors[name, "step.scalar"].dtype))
            reading.add(name, "step.scalar", 0, steps[name])
        found[name] = state
    reading.run()
    for name, step in steps.items():
        found[name]["step"] = int(step)
    return found
