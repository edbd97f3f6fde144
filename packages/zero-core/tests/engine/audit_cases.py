"""Faults planted below torch's knowledge, and clean runs, under `audit_every`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zero_core
from zero_partition import Layout

WIDTH, MICRO = 32, 4
BLOCKED = "blocks.1.0.weight"


class Model(nn.Module):
    """Blocks with dropout that are units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        h = h + self.shift.to(h.dtype)
        for block in self.blocks:
            h = h + block(h)
        return F.mse_loss(self.head(h).float(), x[:, :2].float())


def start(stage: int, dtype: str, every: int = 1, model: nn.Module | None = None, **changes: Any) -> zero_core.Engine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "audit_every": every,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 40},
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
        **changes,
    }
    return zero_core.initialize(model=model if model is not None else Model(), config=config)[0]


def step(engine: zero_core.Engine) -> None:
    dtype = engine.partition.options.policy.param_dtype
    for micro in range(engine.gradient_accumulation_steps()):
        seed = 100 * engine.global_steps + 10 * micro + dist.get_rank()
        x = torch.randn(MICRO, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        engine.backward(engine(x))
        engine.step()


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of a tensor's first element, as broken memory would: torch does not know."""
    byte = ctypes.c_uint8.from_address(tensor.data_ptr())
    byte.value ^= 1


def unit_of(engine: zero_core.Engine, name: str = BLOCKED) -> Any:
    return next(unit for unit in engine.partition.units if name in unit.names)


def in_weight(engine: zero_core.Engine) -> None:
    """A gathered weight that the other rank's optimizer updates."""
    unit = unit_of(engine)
    start, _ = unit.layout.shard_range(1 - dist.get_rank())
    flip(unit.flat[start:])


def in_own_weight(engine: zero_core.Engine) -> None:
    unit = unit_of(engine)
    start, _ = unit.layout.shard_range(dist.get_rank())
    flip(unit.flat[start:])


def in_buffer(engine: zero_core.Engine) -> None:
    flip(engine.module.shift)


def in_master(engine: zero_core.Engine) -> None:
    flip(unit_of(engine).master)


def in_moment(engine: zero_core.Engine) -> None:
    sharded = engine.sharded_optimizer
    assert sharded is not None
    owned = next(o for o in sharded.fragments if o.unit is unit_of(engine))
    flip(sharded.state[owned.tensor]["exp_avg_sq"])


def on_tier(engine: zero_core.Engine) -> None:
    """A moment that the host or a file keeps."""
    update: Any = engine.partition.states
    update.flush()
    extents = update._parts.tier.extents()
    if extents:
        update._parts.tier._ring.forget()  # what is still in a buffer would be written over the fault
        extent = extents[f"{BLOCKED}/exp_avg_sq"][0]
        with open(extent.path, "r+b") as file:
            file.seek(extent.file_offset_bytes)
            byte = file.read(1)[0]
            file.seek(extent.file_offset_bytes)
            file.write(bytes([byte ^ 1]))
        return
    places = zip(update._parts.slices, update._parts.tier._tensors, strict=True)
    pairs = (pair for slice_, tensors in places for pair in zip(slice_, tensors, strict=True))
    flip(next(tensors["exp_avg_sq"] for span, tensors in pairs if span.fragment.name == BLOCKED))


def on_wire(engine: zero_core.Engine) -> None:
    """What has just been received and averaged."""
    for gradients in engine.partition.runtime.gradients.values():
        end = gradients.finish_reduce_scatter

        def broken(end: Any = end, of: Any = gradients) -> None:
            arrived = of._leaf if of._leaf is not None else of._arriving
            flip(arrived if arrived is not None else of._slice(of.reduced) if of._full_group else of.reduced)
            end()

        gradients.finish_reduce_scatter = broken


def in_layout(engine: zero_core.Engine) -> None:
    engine.partition.layout = Layout(tuple(reversed(engine.partition.layout.units)))


def in_rate(engine: zero_core.Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] *= 1.5


def in_gradient(engine: zero_core.Engine) -> None:
    """After autograd, before it travels or is added to."""
    for gradients in engine.partition.runtime.gradients.values():
        add = gradients.add

        def broken(
            index: int, gradient: torch.Tensor, *, more_follow: bool, add: Any = add, of: Any = gradients
        ) -> None:
            add(index, gradient, more_follow=more_follow)
            if not index:
                flip(of._views[0])

        gradients.add = broken


FAULTS: dict[str, Callable[[zero_core.Engine], None]] = {
    "weight": in_weight,
    "own weight": in_own_weight,
    "buffer": in_buffer,
    "master": in_master,
    "moment": in_moment,
    "layout": in_layout,
    "rate": in_rate,
    "gradient": in_gradient,
    "tier": on_tier,
    "wire": on_wire,
}


def tier_settings(stage: int, tier: str, folder: str) -> dict[str, Any]:
    """Masters and moments, and at stage 3 weights, on a tier; so few buffers that files are read."""
    place = {"device": "cpu"} if tier == "host" else {"device": "nvme", "nvme_path": folder, "buffer_count": 3}
    sections = {"offload_optimizer": place, **({"offload_param": place} if stage == 3 else {})}
    return {"stage": stage, "unit_min_numel": 1, "stage3_param_persistence_threshold": 40, "sub_group_size": 512} | (
        sections if tier != "device" else {}
    )


Case = tuple[str, int, str, str]
"""A fault, the stage, the dtype, and the tier of masters and moments."""


def planted(cases: list[Case], folder: str) -> dict[str, str]:
    """What the step after a fault on rank 1 raises here, and what had become of the weights."""
    found = {}
    for number, (fault, stage, dtype, tier) in enumerate(cases):
        place = Path(folder) / str(number)  # an engine that fails keeps its files until it is gone
        place.mkdir(exist_ok=True)
        engine = start(stage, dtype, zero_optimization=tier_settings(stage, tier, str(place)))
        step(engine)
        step(engine)
        if dist.get_rank() == 1:
            FAULTS[fault](engine)
        try:
            step(engine)
            said = "none"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found[f"{fault} {stage} {dtype} {tier}"] = f"{said}\nsteps {engine.global_steps}"
    return found


def clean(cases: list[tuple[int, str, dict[str, Any]]], intervals: tuple[int, ...]) -> list[bool]:
    """Runs with and without audits end with the same weights, whatever the user does between steps."""
    equal = []
    for stage, dtype, changes in cases:
        ends = []
        for every in (*intervals, None):
            engine = start(stage, dtype, **{"every": every, **changes})  # type: ignore[arg-type]
            for number in range(5):
                step(engine)
                parameter = engine.module.blocks[1][0].weight
                if number == 1:
                    engine.set_full_param(parameter, engine.full_param(parameter) * 0.5)
                if number == 2 and "offload_optimizer" not in changes.get("zero_optimization", {}):
                    engine.set_full_state(parameter, "exp_avg", engine.full_state(parameter, "exp_avg") * 0.5)
                if number == 3:
                    with engine.gathered([parameter], modifier_rank=0), torch.no_grad():
                        parameter.mul_(0.5)
            ends.append([engine.full_param(p).clone() for p in engine.module.parameters()])
            engine.destroy()
        equal.append(all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True)))
    return equal
