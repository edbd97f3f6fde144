"""The tiers of shards, masters, moments, gradients and activations that the configuration offloads."""

from __future__ import annotations

import logging
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
    ExactUpdate,
    FragmentPlan,
    HostBudget,
    HostStore,
    MissingExtraError,
    NvmeStore,
    OffloadedUpdate,
    ShardPlan,
    TierOptions,
    Trace,
    malloc,
    offload_activations,
)
from zero_offload.swap_paths import need_disk, swap_paths
from zero_partition import element_positions, refuse_on_tier

from .errors import UsageError
from .swap_folders import check_swap_folders, folders_in_use, remove_abandoned
from .text import say

logger = logging.getLogger("zero_core")

if TYPE_CHECKING:
    from zero_partition import MakeStates, Residency, ShardNeeds, StateTier
    from zero_settings import Config

_BLOCK = 256
Sink = Callable[[str, str, float, float, int, bool], object]
"""Receives each transfer between tiers; see `zero_offload.Trace`."""
_STATE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "int8": torch.int8}


class Offloading:
    """Makes the tiers of one engine, as `zero_optimization.offload_*` and `offload` say. The constructor checks or
    creates their folders, removes the swap files of an earlier run, and sets the allocator.

    ``budget``: returns a memory budget for one of a number of processes on this host. ``sink``: receives transfers.
    Call order: `parameter_store`, `state_tier` before the model is sharded; then `forward` around every forward pass,
    `after_step` after every step, `close`.

    Attributes:
        trace: records transfers; None unless `offload.report`, `offload.trace` or a ``sink`` needs it.
        update: the optimizer update on its tier; None while it is on the device.
        store: the store of parameter shards; None if they are on the device.
        processes: the number of ranks that share this host's memory and drives."""

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
        remove_abandoned(config, rank, dist.get_world_size())
        for paths in folders_in_use(config) if rank == 0 else ():
            if len(paths.folders) > 1:
                say(swap_paths(paths).described())
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
        self._parking: HostStore | None = None
        self._steps = 0
        self._trace_saved = section.trace is None
        self._keeps_freed_memory = self._set_freed_memory()

    def _set_freed_memory(self) -> bool:
        """Set whether the C library keeps freed memory: as `keep_freed_memory` says or, if that is null, it keeps it
        where the CPU computes and nothing is offloaded. Return whether it keeps it; false also if nothing was set."""
        keep, zero = self._config.keep_freed_memory, self._config.zero_optimization
        tiers = zero.offload_param, zero.offload_optimizer, self._config.offload.activations
        stays = self._device.type == "cpu" and all(tier.device == "none" for tier in tiers)
        if keep is None and stays and malloc.is_tunable():
            keep = True
        if keep is not None:
            malloc.keep_freed_memory(keep)
        return bool(keep)

    def new_budget(self) -> HostBudget:
        """Return a new, unused memory budget for this process, which shares the host with `processes` - 1 others."""
        return self._make_budget(self.processes)

    # -- before the model is sharded -----------------------------------------------------------------------------

    def parameter_store(self, dtype: torch.dtype) -> Residency | None:
        """Open and return the store for parameter shards of ``dtype`` that `offload_param` asks for, and keep it as
        `store`. None if they stay where they are: below stage 3, without offload, and with "cpu" for one rank on the
        CPU. Raises `BudgetError` if drives, or an accelerator's host, have no room. Call it once: each call opens a new
        store."""
        section = self._config.zero_optimization.offload_param
        nbytes = -(-self._numel // shard_ranks(self._config)) * dtype.itemsize
        sharded = self._config.zero_optimization.stage == 3
        if section.device == "nvme" and sharded:
            need_disk(self._budget, "parameter shards", nbytes, section.paths)
        elif section.device == "cpu" and sharded and self._device.type != "cpu":
            self._budget.need("parameter shards", nbytes)
        self._budget.check()
        self.store = _open_store(self._config, self._rank, self._device, dtype, self.trace)
        return self.store

    def state_tier(self, optimizer: Optimizer | None) -> MakeStates | None:
        """Return the function that makes the tier of `offload_optimizer` from shards; None without an optimizer or
        offload. Raises `UsageError` at stage 0 and for options that exclude it, `PartitionError` if ``optimizer`` needs
        full parameters."""
        zero = self._config.zero_optimization
        section = zero.offload_optimizer
        if section.device == "none" or optimizer is None:
            return None
        if zero.stage == 0:
            raise UsageError("zero_optimization.offload_optimizer needs stage 1, 2 or 3; at stage 0 nothing is sharded")
        if not OffloadedUpdate.supports(optimizer):
            refuse_on_tier(optimizer)
            if self._rank == 0:
                say(f"offload_optimizer: {type(optimizer).__name__} has no CPU kernel; torch steps it on the host")
        options, beside = self._tier_options(), self._config.offload.delayed_update or section.overlap == "exact"
        try:
            options.check_device(self._device, optimizer, beside=beside)
        except ValueError as error:
            raise UsageError(f"zero_optimization.offload_optimizer.{error}") from error
        return lambda shards, residency: self._make_update(optimizer, options, shards, residency)

    def _make_update(
        self, optimizer: Optimizer, tier_options: TierOptions, shards: Sequence[ShardNeeds], residency: Residency
    ) -> StateTier:
        """Make the tier for masters and states of ``shards``, one per trained unit; keep it as `update` and return it.
        ``residency``: lends the weights. Raises `BudgetError` if masters and states do not fit into memory or
        drives."""
        self._advise_on_threads()
        groups = _group_of_parameter(optimizer)
        section = self._config.zero_optimization.offload_optimizer
        in_host = self._device.type == "cpu" or self._config.zero_optimization.offload_param.device != "none"
        plans = _shard_plans(shards, groups, in_host)
        common: dict[str, Any] = {"device": self._device, "budget": self._budget, "trace": self.trace}
        what = plans, optimizer, lambda: optimizer.param_groups, residency, tier_options
        if self._config.offload.delayed_update:
            self.update = DelayedUpdate(*what, **common)
        elif section.overlap == "exact":
            self.update = ExactUpdate(*what, journal_nbytes=section.overlap_journal, **common)
        else:
            self.update = OffloadedUpdate(*what, gradients="nvme" if section.device == "nvme" else "host", **common)
        return self.update

    def _tier_options(self) -> TierOptions:
        """Return what the configuration says about optimizer states on a tier, as zero-offload takes it."""
        section = self._config.zero_optimization.offload_optimizer
        tier: Literal["host", "nvme"] = "nvme" if section.device == "nvme" else "host"
        return TierOptions(
            tier=tier,
            path=section.paths if tier == "nvme" else None,
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
        """Return the dtype for moments on a tier: bfloat16 or int8 if the configuration names it; None for float32."""
        named = self._config.offload.state_dtype
        if named is not None:
            return _STATE_DTYPES[named]
        if self._config.bf16.bf16_optimizer_states:
            return torch.bfloat16
        params = self._config.optimizer.params if self._config.optimizer is not None else None
        return torch.bfloat16 if getattr(params, "fp32_optimizer_states", True) is False else None

    # -- while training ----------------------------------------------------------------------------------------------

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass, which moves the tensors that autograd saves, except the model's
        parameters, to the tier of `offload.activations`; a null context without that tier."""
        return nullcontext() if self._activations is None else self._activations

    def _activation_tier(self, model: nn.Module) -> offload_activations | None:
        """Return a new context that moves what autograd saves, except the model's parameters, to a tier; None if
        off."""
        section = self._config.offload.activations
        if section.device == "none":
            return None
        on_nvme = section.device == "nvme"
        return offload_activations(
            model,
            tier="nvme" if on_nvme else "host",
            path=section.paths if on_nvme else None,
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
        """Return an empty store on ``device`` ("cpu" or "nvme") for `Engine.offload_states`. ``pin``: in pinned host
        memory, which later calls use again. Raises `UsageError` for other devices, and without an `nvme_path`."""
        if device == "cpu":
            if not pin:
                return HostStore(device=self._device, pin=False)
            self._parking = self._parking or HostStore(device=self._device, keep_memory=True)
            return self._parking
        if device != "nvme":
            raise UsageError(f"engine.offload_states(device=…): expected 'cpu' or 'nvme', got {device!r}")
        zero = self._config.zero_optimization
        sections = (zero.offload_optimizer, zero.offload_param, self._config.offload.activations)
        path = next((section.paths for section in sections if section.nvme_path is not None), None)
        if path is None:
            raise UsageError(
                "engine.offload_states(device='nvme'): expected a folder in the configuration, as "
                "zero_optimization.offload_optimizer.nvme_path"
            )
        return NvmeStore(path, device=self._device, prefix=f"parked.rank{self._rank}", engine=_io_engine(self._config))

    def after_step(self, step: int) -> None:
        """Write the trace file once `offload.trace_steps` steps are over. If `offload.report` is due after optimizer
        step ``step`` (every `steps_per_print`), print the table of transfers on rank 0."""
        if self.trace is None:
            return
        section, every = self._config.offload, self._config.steps_per_print
        self._steps += 1
        if not self._trace_saved and self._steps == section.trace_steps:
            self._save_trace()
        due = every is None or (0 < every < float("inf") and step % every == 0)
        if section.report and due:
            if self._rank == 0:
                say(self.table())
            if self._trace_saved:
                self.trace.clear()

    def table(self) -> str:
        """Return a table of the transfers since the last report, or of all until the trace file is written, one line
        per kind of transfer: bytes, bandwidth, overlapped fraction. Then what the tiers report."""
        lines = [] if self.trace is None else [self.trace.table()]
        for name, tier in (("optimizer", self.update), ("parameters", self.store)):
            if isinstance(tier, (OffloadedUpdate, DelayedUpdate, NvmeStore)):
                lines += tier.report(name)
        return "\n".join(lines)

    def memory(self) -> dict[str, int]:
        """Return the bytes of offloaded activations that wait for backward now, by tier; empty if none are."""
        return {} if self._activations is None else self._activations.memory()

    def _advise_on_threads(self) -> None:
        """Log a warning, on one rank of the host, if the update on the CPU has one thread and could have more."""
        from zero_launch.cores import warn_of_one_thread  # only where it is needed, as it takes 0.1 s

        warn_of_one_thread(torch.get_num_threads(), self.processes, logger)

    def close(self) -> None:
        """Write the trace if that is still to be done, remove files of activations, and give kept memory back."""
        if self._activations is not None:
            self._activations.close()
        if self._parking is not None:
            self._parking.close()
        if self._keeps_freed_memory:
            malloc.return_free_memory()
        if self.trace is not None:
            if not self._trace_saved:
                self._save_trace()
            self.trace.close()

    def _save_trace(self) -> None:
        """Write the trace file, with this rank's number in its name, and stop tracing unless reports need it."""
        self._trace_saved = True
        if self.trace is not None and self._config.offload.trace is not None:
            target = Path(self._config.offload.trace)
            target = target.with_name(f"{target.stem}.rank{self._rank}{target.suffix or '.json'}")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.trace.save(target)
            if not self._config.offload.report:
                self.trace.stop()


def state_block(config: Config) -> int:
    """Return how many elements of offloaded states share a quantization block: 256 for 8-bit states, else 1."""
    return _BLOCK if config.offload.state_dtype == "int8" else 1


def shard_ranks(config: Config) -> int:
    """Return the number of ranks over which one replica of the model is sharded."""
    size = config.zero_optimization.mics_shard_size
    return size if size > 0 else config.world_size


def _open_store(
    config: Config, rank: int, device: torch.device, dtype: torch.dtype, trace: Trace | None
) -> HostStore | NvmeStore | None:
    """Return a new, empty store for parameter shards of ``dtype``, of the kind that `zero_optimization.offload_param`
    asks for; None without offload, below stage 3, and with "cpu" for a single rank on the CPU."""
    zero = config.zero_optimization
    section = zero.offload_param
    if section.device == "none" or zero.stage < 3:
        return None
    if section.device == "cpu":
        alone = device.type == "cpu" and shard_ranks(config) == 1
        return None if alone else HostStore(device=device, pin=section.pin_memory, trace=trace)
    return NvmeStore(
        section.paths,
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


def _group_of_parameter(optimizer: Optimizer) -> dict[int, int]:
    """Return the index of each parameter's param group in ``optimizer``, by the parameter's `id`."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _shard_plans(shards: Sequence[ShardNeeds], groups: dict[int, int], in_host: bool) -> list[ShardPlan]:
    """Return, for each shard, what zero-offload needs to update it: sizes, dtypes, fragments. ``groups``: param groups
    by the parameter's `id`; ``in_host``: shards are in host memory, so that weights of 32 or 64 bits are updated in
    place."""
    plans, positions = [], element_positions((shard.layout for shard in shards), _BLOCK)
    for shard in shards:
        fragments = tuple(
            FragmentPlan(
                name=f.entry.name,
                start=f.shard_offset,
                numel=f.length,
                group=groups[id(shard.plan.parameters[f.entry.name])],
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
                read_at_once=shard.stays_gathered,
            )
        )
    return plans


def _io_engine(config: Config) -> Any:
    """Return a zero-nvme-aio engine with the settings of `aio`; None if all are defaults. Raises `MissingExtraError` if
    that package is not installed."""
    defaults = type(config.aio)().model_dump()
    given = {key: value for key, value in config.aio.model_dump().items() if value != defaults[key]}
    if not given:
        return None
    try:
        from zero_nvme_aio import Engine
    except ImportError as error:
        raise MissingExtraError("the NVMe tier needs zero-nvme-aio; run: pip install 'zero-core[nvme]'") from error
    return Engine.from_deepspeed(given)
