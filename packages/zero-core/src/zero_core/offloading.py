"""The tiers of shards, masters, moments and gradients when the configuration says that they leave the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zero_offload import (
    DelayedUpdate,
    FragmentPlan,
    HostBudget,
    HostStore,
    MissingExtraError,
    NvmeStore,
    OffloadedUpdate,
    ShardPlan,
    TierOptions,
    Trace,
    offload_activations,
)
from zero_partition import element_positions

from .errors import UsageError
from .swap_folders import check_swap_folders, remove_abandoned
from .text import say

if TYPE_CHECKING:
    from zero_config import Config
    from zero_partition import MakeStates, Residency, ShardNeeds, StateTier

_BLOCK = 256
Sink = Callable[[str, str, float, float, int, bool], object]
"""Takes what moves between tiers; see `zero_offload.Trace`."""
_STATE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "int8": torch.int8}


class Offloading:
    """The tiers of one engine: decides what leaves the device, as `zero_optimization.offload_*` and `offload` say.

    ``budget``: of a number of processes on this host.

    Call order: `parameter_store`, `state_tier` before the model is sharded; then `forward` around every forward pass,
    `after_step` after every step, `close`.

    Attributes:
        trace: what moved when; None unless `offload.report`, `offload.trace` or a ``sink`` asks for it.
        update: the optimizer's side on its tier; None where that is the device.
        store: where parameter shards are; None where that is the device.
        processes: how many share this host's memory and drives.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        rank: int,
        device: torch.device,
        budget: Callable[[int], HostBudget],
        sink: Sink | None = None,
    ) -> None:
        check_swap_folders(config)
        remove_abandoned(config, dist.get_world_size())
        section = config.offload
        keep = section.report or section.trace is not None
        self.trace: Trace | None = Trace(rank=rank, sink=sink, keep=keep) if keep or sink is not None else None
        self.update: OffloadedUpdate | DelayedUpdate | None = None
        self.store: HostStore | NvmeStore | None = None
        self._config = config
        self._numel = sum(p.numel() for p in model.parameters())
        self._rank = rank
        self._device = device
        self.processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._make_budget = budget
        self._budget = self.new_budget()
        self._activations = self._activation_tier(model)
        self._steps = 0
        self._saved = section.trace is None

    def new_budget(self) -> HostBudget:
        """Return a budget of which nothing is taken yet."""
        return self._make_budget(self.processes)

    # -- before the model is sharded -----------------------------------------------------------------------------

    def parameter_store(self, dtype: torch.dtype) -> Residency | None:
        """The store for shards of ``dtype`` that `offload_param` asks for; None for the device.

        Raises `BudgetError` where they do not fit.
        """
        section = self._config.zero_optimization.offload_param
        nbytes = -(-self._numel // shard_ranks(self._config)) * dtype.itemsize
        if section.device == "nvme" and self._config.zero_optimization.stage == 3:
            need_disk(self._budget, "parameter shards", nbytes, section.nvme_path or ())
        elif section.device == "cpu" and self._device.type != "cpu":
            self._budget.need("parameter shards", nbytes)
        self._budget.check()
        self.store = _open_store(self._config, self._rank, self._device, dtype, self.trace)
        return self.store

    def state_tier(self, optimizer: Optimizer | None) -> MakeStates | None:
        """Return what makes the tier that `offload_optimizer` asks for; None for the device.

        Raises `UsageError` at stage 0, and for what there is no kernel for.
        """
        zero = self._config.zero_optimization
        section = zero.offload_optimizer
        if section.device == "none" or optimizer is None:
            return None
        if zero.stage == 0:
            raise UsageError("zero_optimization.offload_optimizer needs stage 1, 2 or 3; at stage 0 nothing is sharded")
        if not OffloadedUpdate.supports(type(optimizer)):
            raise UsageError(
                f"zero_optimization.offload_optimizer: {type(optimizer).__name__} has no CPU kernel. Use Adam, AdamW, "
                'Adagrad, Lion or SGD, or set offload_optimizer.device to "none"'
            )
        if section.device == "cpu" and section.ratio < 1 and self._device.type != "cpu":
            raise UsageError(
                'zero_optimization.offload_optimizer.ratio: expected 1 with device "cpu" where the model computes on '
                f"{self._device}, got {section.ratio}: the kernels update in host memory only"
            )
        return lambda shards, residency: self._make_update(optimizer, shards, residency)

    def _make_update(self, optimizer: Optimizer, shards: Sequence[ShardNeeds], residency: Residency) -> StateTier:
        groups = _groups_of(optimizer)
        section = self._config.zero_optimization.offload_optimizer
        in_host = self._device.type == "cpu" or self._config.zero_optimization.offload_param.device != "none"
        plans = list(_plans(shards, groups, in_host))
        tier_options = self._tier_options("nvme" if section.device == "nvme" else "host")
        common: dict[str, Any] = {"device": self._device, "budget": self._budget, "trace": self.trace}
        if self._config.offload.delayed_update:
            self.update = DelayedUpdate(
                plans, type(optimizer), lambda: optimizer.param_groups, residency, tier_options, **common
            )
        else:
            self.update = OffloadedUpdate(
                plans,
                type(optimizer),
                lambda: optimizer.param_groups,
                residency,
                tier_options,
                gradients="nvme" if section.device == "nvme" else "host",
                **common,
            )
        return self.update

    def _tier_options(self, tier: Literal["host", "nvme"]) -> TierOptions:
        section = self._config.zero_optimization.offload_optimizer
        return TierOptions(
            tier=tier,
            path=section.nvme_path if tier == "nvme" else None,
            sub_group_size=self._config.zero_optimization.group_size,
            buffer_count=section.buffer_count,
            pipeline_read=section.pipeline_read,
            pipeline_write=section.pipeline_write,
            ratio=section.ratio,
            state_dtype=self._state_dtype(),
            pin=section.pin_memory,
            verify=self._config.offload.verify,
            prefix=f"optimizer.rank{self._rank}",
            engine=_io_engine(self._config) if tier == "nvme" else None,
        )

    def _state_dtype(self) -> torch.dtype | None:
        named = self._config.offload.state_dtype
        if named is not None:
            return _STATE_DTYPES[named]
        if self._config.bf16.bf16_optimizer_states:
            return torch.bfloat16
        params = self._config.optimizer.params if self._config.optimizer is not None else None
        return torch.bfloat16 if getattr(params, "fp32_optimizer_states", True) is False else None

    # -- while training ----------------------------------------------------------------------------------------------

    def forward(self) -> AbstractContextManager[Any]:
        """Send what autograd saves inside to where `offload.activations` says; the model's parameters stay."""
        return nullcontext() if self._activations is None else self._activations

    def _activation_tier(self, model: nn.Module) -> offload_activations | None:
        section = self._config.offload.activations
        if section.device == "none":
            return None
        on_nvme = section.device == "nvme"
        return offload_activations(
            model,
            tier="nvme" if on_nvme else "host",
            path=section.nvme_path if on_nvme else None,
            device=self._device,
            min_bytes=section.min_bytes,
            prefetch=section.prefetch,
            in_flight_bytes=section.in_flight_bytes,
            verify=self._config.offload.verify,
            prefix=f"activations.rank{self._rank}",
            engine=_io_engine(self._config) if on_nvme else None,
            trace=self.trace,
        )

    def parking_store(self, device: str, pin: bool) -> HostStore | NvmeStore:
        """An empty store for states that are not needed for a while. Raises `UsageError`."""
        if device == "cpu":
            return HostStore(device=self._device, pin=pin)
        if device != "nvme":
            raise UsageError(f"engine.offload_states(device=…): expected 'cpu' or 'nvme', got {device!r}")
        zero = self._config.zero_optimization
        sections = (zero.offload_optimizer, zero.offload_param, self._config.offload.activations)
        path = next((section.nvme_path for section in sections if section.nvme_path is not None), None)
        if path is None:
            raise UsageError(
                "engine.offload_states(device='nvme'): expected a folder in the configuration, as "
                "zero_optimization.offload_optimizer.nvme_path"
            )
        return NvmeStore(path, device=self._device, prefix=f"parked.rank{self._rank}", engine=_io_engine(self._config))

    def after_step(self, step: int) -> None:
        """Say what moved when that is due, and write the trace's file once its steps are over."""
        if self.trace is None:
            return
        section, every = self._config.offload, self._config.steps_per_print
        self._steps += 1
        if not self._saved and self._steps == section.trace_steps:
            self._save()
        due = every is None or (every != float("inf") and step % int(every) == 0)
        if section.report and due:
            if self._rank == 0:
                say(self.table())
            if self._saved:
                self.trace.clear()

    def table(self) -> str:
        """Return what moved since the last report, hop by hop: bytes, bandwidth, the share that nobody waited for; and
        what was written to drives."""
        lines = [] if self.trace is None else [self.trace.table()]
        for name, tier in (("optimizer", self.update), ("parameters", self.store)):
            if isinstance(tier, (OffloadedUpdate, DelayedUpdate, NvmeStore)) and tier.bytes_written():
                lines.append(
                    f"{name}: {tier.bytes_written()} bytes written to drives, "
                    f"{tier.bytes_written_per_day() / 1e12:.3f} TB per day"
                )
        return "\n".join(lines)

    def memory(self) -> dict[str, int]:
        """Bytes of activations that wait for backward now, by tier."""
        return {} if self._activations is None else self._activations.memory()

    def close(self) -> None:
        """Write what there is of a trace whose steps are not over, and remove the files of activations."""
        if self._activations is not None:
            self._activations.close()
        if self.trace is not None:
            if not self._saved:
                self._save()
            self.trace.close()

    def _save(self) -> None:
        self._saved = True
        if self.trace is not None and self._config.offload.trace is not None:
            target = Path(self._config.offload.trace)
            target = target.with_name(f"{target.stem}.rank{self._rank}{target.suffix or '.json'}")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.trace.save(target)
            if not self._config.offload.report:
                self.trace.stop()


def state_block(config: Config) -> int:
    """Elements of a parameter that share something in the states on a tier: 256 share a scale of 8-bit states."""
    return _BLOCK if config.offload.state_dtype == "int8" else 1


def need_disk(budget: HostBudget, purpose: str, nbytes: int, paths: Sequence[str]) -> None:
    """Add ``nbytes`` in files, striped over ``paths``, to what ``budget`` will check."""
    for path in paths:
        budget.need(purpose, -(-nbytes // len(paths)), "disk", path=path)


def shard_ranks(config: Config) -> int:
    """How many ranks have one copy of the model between them."""
    size = config.zero_optimization.mics_shard_size
    return size if size > 0 else config.world_size


def _open_store(
    config: Config,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    trace: Trace | None,
) -> HostStore | NvmeStore | None:
    """An empty store of the kind that `zero_optimization.offload_param` asks for; None for the device. Its sizes in
    elements are of ``dtype``.

    One rank that computes in host memory keeps its parameters there without a store.
    """
    zero = config.zero_optimization
    section = zero.offload_param
    if section.device == "none" or zero.stage < 3:
        return None
    if section.device == "cpu":
        alone = device.type == "cpu" and shard_ranks(config) == 1
        return None if alone else HostStore(device=device, pin=section.pin_memory, trace=trace)
    return NvmeStore(
        section.nvme_path or (),
        device=device,
        buffer_count=section.buffer_count,
        buffer_bytes=section.buffer_size * dtype.itemsize,
        host_bytes=section.max_in_cpu * dtype.itemsize,
        verify=config.offload.verify,
        prefix=f"parameters.rank{rank}",
        engine=_io_engine(config),
        pin=section.pin_memory,
        trace=trace,
    )


def _groups_of(optimizer: Optimizer) -> dict[int, int]:
    """id of parameter -> number of its param group."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _plans(shards: Sequence[ShardNeeds], groups: dict[int, int], in_host: bool) -> list[ShardPlan]:
    """One plan per trained unit."""
    plans, positions = [], element_positions((shard.layout for shard in shards), _BLOCK)
    for shard in shards:
        fragments = tuple(
            FragmentPlan(
                name=f.entry.name,
                start=f.shard_offset,
                numel=f.length,
                group=groups[id(_parameter(shard, f.entry.name))],
                element_offset=positions[f.entry.name] + f.param_offset,
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
    return plans


def _parameter(shard: ShardNeeds, name: str) -> nn.Parameter:
    return shard.plan.parameters[name]


def _io_engine(config: Config) -> Any:
    """An I/O engine with the settings of the `aio` section where it is given; None lets the store choose."""
    defaults = type(config.aio)().model_dump()
    given = {key: value for key, value in config.aio.model_dump().items() if value != defaults[key]}
    if not given:
        return None
    try:
        from zero_nvme_aio import Engine
    except ImportError as error:
        raise MissingExtraError("the NVMe tier needs zero-nvme-aio; run: pip install 'zero-core[nvme]'") from error
    return Engine.from_deepspeed(given)
