"""Where shards, masters, moments and gradients live when the configuration says that it is not the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from zero_offload import (
    FragmentPlan,
    HostBudget,
    HostStore,
    MissingExtraError,
    NvmeStore,
    OffloadedUpdate,
    Placement,
    ShardPlan,
)

from .errors import UsageError

if TYPE_CHECKING:
    from zero_partition import MakeStates, Residency, ShardNeeds, StateTier

    from .config import Config


def parameter_store(config: Config, rank: int, device: torch.device, dtype: torch.dtype) -> Residency | None:
    """The store for parameter shards that `zero_optimization.offload_param` asks for; None for the device."""
    zero = config.zero_optimization
    section = zero.offload_param
    if section.device == "none" or zero.stage < 3:
        return None
    if section.device == "cpu":
        return HostStore(device=device, pin=section.pin_memory)
    return NvmeStore(
        str(section.nvme_path),
        device=device,
        buffer_count=section.buffer_count,
        buffer_bytes=section.buffer_size * dtype.itemsize if "buffer_size" in section.model_fields_set else 0,
        host_bytes=section.max_in_cpu * dtype.itemsize if "max_in_cpu" in section.model_fields_set else 0,
        prefix=f"parameters.rank{rank}",
        engine=_io_engine(config),
        pin=section.pin_memory,
    )


def state_tier(config: Config, optimizer: Optimizer | None, rank: int, device: torch.device) -> MakeStates | None:
    """What makes the tier that `zero_optimization.offload_optimizer` asks for; None for the device.

    Raises `UsageError` at stage 0 and for an optimizer whose arithmetic there is no kernel for.
    """
    zero = config.zero_optimization
    if zero.offload_optimizer.device == "none" or optimizer is None:
        return None
    if zero.stage == 0:
        raise UsageError("zero_optimization.offload_optimizer needs stage 1, 2 or 3; at stage 0 nothing is sharded")
    if not OffloadedUpdate.supports(type(optimizer)):
        raise UsageError(
            f"zero_optimization.offload_optimizer: {type(optimizer).__name__} has no CPU kernel. Use Adam, AdamW, "
            'Adagrad, Lion or SGD, or set offload_optimizer.device to "none"'
        )
    return _StateTier(config, optimizer, rank, device)


@dataclass(frozen=True)
class _StateTier:
    """Builds the tier once the layout is known (`zero_partition.MakeStates`)."""

    config: Config
    optimizer: Optimizer
    rank: int
    device: torch.device

    def __call__(self, shards: Sequence[ShardNeeds], residency: Residency, /) -> StateTier:
        groups = _groups_of(self.optimizer)
        on_nvme = self.config.zero_optimization.offload_optimizer.device == "nvme"
        where: Literal["host", "nvme"] = "nvme" if on_nvme else "host"
        in_host = self.device.type == "cpu" or self.config.zero_optimization.offload_param.device != "none"
        return OffloadedUpdate(
            list(_plans(shards, groups, in_host)),
            type(self.optimizer),
            lambda: self.optimizer.param_groups,
            residency,
            self._placement(where),
            gradients=where,
            device=self.device,
            budget=HostBudget(processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        )

    def _placement(self, tier: Literal["host", "nvme"]) -> Placement:
        section = self.config.zero_optimization.offload_optimizer
        explicit = section.model_fields_set
        params = self.config.optimizer.params if self.config.optimizer is not None else None
        narrow = getattr(params, "fp32_optimizer_states", True) is False
        return Placement(
            tier=tier,
            path=section.nvme_path if tier == "nvme" else None,
            sub_group_size=max(4096, min(self.config.zero_optimization.sub_group_size, 1 << 23)),
            buffer_count=section.buffer_count,
            pipeline_read=section.pipeline_read if "pipeline_read" in explicit else True,
            pipeline_write=section.pipeline_write if "pipeline_write" in explicit else True,
            ratio=section.ratio if tier == "nvme" else 1.0,
            state_dtype=torch.bfloat16 if narrow else None,
            pin=section.pin_memory,
            prefix=f"optimizer.rank{self.rank}",
            engine=_io_engine(self.config) if tier == "nvme" else None,
        )


def _groups_of(optimizer: Optimizer) -> dict[int, int]:
    """id of parameter -> number of its param group."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _plans(shards: Sequence[ShardNeeds], groups: dict[int, int], in_host: bool) -> list[ShardPlan]:
    """One plan per trained unit; global positions run through all units in order."""
    plans, base = [], 0
    for shard in shards:
        start, _ = shard.layout.shard_range(shard.rank)
        fragments = tuple(
            FragmentPlan(
                name=f.entry.name,
                start=f.shard_offset,
                numel=f.length,
                group=groups[id(_parameter(shard, f.entry.name))],
                element_offset=base + start + f.shard_offset,
            )
            for f in shard.layout.fragments(shard.rank)
        )
        wide = shard.plan.dtype in (torch.float32, torch.float64)
        plans.append(
            ShardPlan(
                name=shard.plan.name,
                numel=shard.layout.shard_numel,
                dtype=shard.plan.dtype,
                grad_dtype=shard.gradient_dtype,
                fragments=fragments,
                in_place=wide and in_host,
                padding=shard.layout.shard_numel - max((f.start + f.numel for f in fragments), default=0),
            )
        )
        base += shard.layout.numel
    return plans


def _parameter(shard: ShardNeeds, name: str) -> nn.Parameter:
    return shard.plan.parameters[name]


def _io_engine(config: Config) -> Any:
    """An I/O engine with the settings of the `aio` section where it is given; None lets the store choose."""
    section = config.aio
    if not section.model_fields_set:
        return None
    try:
        from zero_nvme_aio import Engine
    except ImportError as error:
        raise MissingExtraError("the NVMe tier needs zero-nvme-aio; run: pip install 'zero-core[nvme]'") from error
    return Engine.from_deepspeed(section.model_dump())
