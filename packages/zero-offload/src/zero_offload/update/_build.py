"""Builds the parts of an update from its plans, after a check that they fit into the budget. A span is consecutive
elements of a fragment; a slice is the spans that are updated together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from ..budget import HostBudget
from ..errors import BudgetError
from ..swap_paths import NvmePath, SwapPaths, need_disk, swap_paths
from ..trace import Trace
from ._device_step import DeviceSteps
from ._filed_gradients import NvmeGradients, gradient_ring_bytes
from ._gradients import (
    CallerGradients,
    Gradients,
    HostGradients,
    gradient_bytes,
)
from ._nvme_tier import NvmeOptions, NvmeTier, ring_bytes
from ._rules import Rule
from ._slices import BLOCK, KeptFragment, Slice, cut_slices, split_by_ratio
from ._split_gradients import SplitGradients, host_parts
from ._staging import StagedSlices, staging_bytes
from ._tiers import DeviceTier, HostTier, SplitTier, Tier, host_bytes
from .plans import BoundedWeights, ShardPlan, Weights
from .tier_options import TierOptions

__all__ = ["UpdateParts", "build", "check_room_for_seal"]

GradientPlace = Literal["host", "nvme", "caller"]


@dataclass(frozen=True)
class UpdateParts:
    """The parts of an update.

    ``slices``: all of them. ``in_memory``: if some slices are in files, those that are not; else empty. ``tier``: keeps
    masters and moments. ``gradients``: what the step reads. ``staged``: brings gradients and weights to the kernels.
    ``on_device``: updates the slices that stay on an accelerator. ``on_host``: updates the others if there is no
    kernel, else None. ``plan``: bytes by what holds them. ``paths``: the folders of the files, None without files.
    """

    slices: Sequence[Slice]
    in_memory: Sequence[Slice]
    tier: Tier
    gradients: Gradients
    staged: StagedSlices
    on_device: DeviceSteps
    on_host: DeviceSteps | None
    plan: Mapping[str, int]
    paths: NvmePath | None

    def memory(self) -> dict[str, int]:
        """Return the bytes held now: ``states``, ``ring`` (buffers in front of files), ``gradients`` and ``staging`` in
        host memory, ``nvme`` in files, ``device`` on the device.
        """
        tier, gradients = self.tier.memory(), self.gradients.memory()
        return {
            "device": tier["device"] + gradients["device"],
            "gradients": gradients["gradients"],
            "nvme": tier["nvme"] + gradients["nvme"],
            "ring": tier["ring"],
            "staging": self.staged.resident_bytes,
            "states": tier["states"],
        }

    def close(self) -> None:
        """Free the memory and remove the files of gradients and states."""
        self.gradients.close()
        self.tier.close()


def build(
    shards: Sequence[ShardPlan],
    rule: Rule,
    fragments: Sequence[KeptFragment],
    weights: Weights,
    tier_options: TierOptions,
    where: GradientPlace,
    device: torch.device,
    budget: HostBudget,
    trace: Trace | None,
) -> UpdateParts:
    """Cut the fragments into slices, plan their memory, check the plan against ``budget``, to which it is added,
    allocate, and return the parts.

    ``rule``: of the optimizer. ``fragments``: those of all ``shards``. ``weights`` lends the shards. ``where``: the
    gradients are collected in ``"host"`` memory or in files (``"nvme"``), or the ``"caller"`` keeps them. ``device``:
    that of weights and gradients. ``trace``, if not None, records the transfers.

    BudgetError if the plan does not fit; ValueError for options that exclude each other; OffloadError if the folders of
    the files cannot be used.
    """
    if where == "nvme" and tier_options.path is None:
        raise ValueError("gradients='nvme': expected a path in the tier options, got none")
    uses_files = _uses_files(fragments, tier_options, budget)
    ratio = tier_options.ratio if uses_files or tier_options.tier == "host" else 1.0
    offloaded, rest = _cut_into_slices(fragments, tier_options, ratio, weights)
    in_files, in_memory = (offloaded, rest) if uses_files else ([], offloaded)
    on_device = [] if uses_files else rest
    kept = [] if device.type == "cpu" else on_device
    slices = [*offloaded, *rest]
    steps = DeviceSteps(rule, len(slices) - len(kept), device)
    host_steps = DeviceSteps(rule, 0, torch.device("cpu")) if rule.run is None else None
    in_host = slices[: len(slices) - len(kept)]
    collected = host_parts(shards, kept)
    pin = tier_options.pin and device.type != "cpu"
    options = _nvme_options(tier_options)
    staging = 0 if device.type == "cpu" else staging_bytes(in_host, gradients_too=where == "caller")
    plan = {
        "device": host_bytes(on_device)
        + (gradient_bytes(shards) - gradient_bytes(collected) if where == "host" else 0),
        "gradients": _gradient_memory(collected, slices, where, options.buffer_count),
        "nvme": host_bytes(in_files) + (gradient_bytes(shards) if where == "nvme" else 0),
        "ring": ring_bytes(in_files, options.buffer_count),
        "staging": staging,
        "states": host_bytes(in_memory),
    }
    _declare_needs(budget, {**plan, "device": 0} if kept else plan, tier_options.path)
    budget.check()
    tier = _make_tier(in_files, in_memory, on_device, device, options, trace)
    gradients: Gradients | None = None
    try:
        gradients = _make_gradients(shards, slices, kept, device, where, options, pin, trace)
        staged = StagedSlices(
            slices, gradients, weights, device, staging=staging, on_device=steps, pin=pin, trace=trace
        )
    except BaseException:
        if gradients is not None:
            gradients.close()
        tier.close()
        raise
    return UpdateParts(
        slices,
        in_memory if in_files else (),
        tier,
        gradients,
        staged,
        steps,
        host_steps,
        MappingProxyType(plan),
        tier_options.path,
    )


def check_room_for_seal(parts: UpdateParts) -> None:
    """Raise BudgetError if the disk has no room for a second copy of everything in files and for what sealing copies;
    do nothing without files. Sealed files are never written again, so the next steps write all data to new ones.
    """
    budget = HostBudget()
    nbytes, carried = parts.tier.memory()["nvme"], parts.tier.carried_bytes()
    if parts.paths is not None and nbytes:
        need_disk(budget, "masters and states after this checkpoint", nbytes, parts.paths)
        need_disk(budget, "masters and states not written since the last", carried, parts.paths)
    budget.check()


def _cut_into_slices(
    fragments: Sequence[KeptFragment], tier_options: TierOptions, ratio: float, weights: Weights
) -> tuple[list[Slice], list[Slice]]:
    """Return (slices of the first ``ratio`` (0 to 1) of the elements, which are offloaded; slices of the rest).

    Two slices are in work at a time. If ``weights`` limits how many shards can be borrowed at a time, each slice
    therefore spans fewer than half of that number of shards, but at least one.
    """
    shards = max(1, (weights.lends_at_most - 1) // 2) if isinstance(weights, BoundedWeights) else None
    grain = BLOCK if tier_options.state_dtype == torch.int8 else 1
    offloaded, rest = split_by_ratio(fragments, ratio, grain)
    size = tier_options.sub_group_size
    return cut_slices(offloaded, size, shards), cut_slices(rest, size, shards)


def _uses_files(fragments: Sequence[KeptFragment], tier_options: TierOptions, budget: HostBudget) -> bool:
    """Return whether states go to files: yes with ``tier="nvme"``, and with ``tier="auto"`` if they do not fit into
    what ``budget`` leaves of host memory; a warning says so then.
    """
    if tier_options.tier != "auto":
        return tier_options.tier == "nvme"
    trial = budget.copy()
    trial.need("masters and optimizer states", sum(f.nbytes(f.plan.numel) for f in fragments))
    try:
        trial.check()
    except BudgetError as error:
        warnings.warn(f"masters and optimizer states go to files: {error}", stacklevel=5)
        return True
    return False


def _nvme_options(tier_options: TierOptions) -> NvmeOptions:
    """Return those of ``tier_options`` that are about files and buffers; without a path the folders are empty."""
    return NvmeOptions(
        paths=SwapPaths(()) if tier_options.path is None else swap_paths(tier_options.path),
        buffer_count=tier_options.buffer_count,
        pipeline_read=tier_options.pipeline_read,
        pipeline_write=tier_options.pipeline_write,
        checksums=tier_options.checksums,
        verify=tier_options.verify,
        prefix=tier_options.prefix,
        engine=tier_options.engine,
    )


def _gradient_memory(
    shards: Sequence[ShardPlan], slices: Sequence[Slice], where: GradientPlace, buffer_count: int
) -> int:
    """Return the bytes of host memory for collected gradients. ``where``: "host", those of all ``shards``; "nvme", the
    buffers through which gradients go to files; "caller", 0.
    """
    if where == "caller":
        return 0
    return gradient_bytes(shards) if where == "host" else gradient_ring_bytes(shards, slices, buffer_count)


def _declare_needs(budget: HostBudget, plan: Mapping[str, int], paths: NvmePath | None) -> None:
    """Add the bytes of ``plan`` to the budget as needs: memory for each purpose and, if ``paths`` is not None, disk
    space in its folders.
    """
    purposes = {
        "device": "masters and optimizer states that are not offloaded",
        "states": "masters and optimizer states",
        "ring": "ring buffers",
        "gradients": "gradients",
        "staging": "staging of gradients and weights",
    }
    for what, purpose in purposes.items():
        if plan[what]:
            budget.need(purpose, plan[what])
    if paths is not None:
        need_disk(budget, "masters, states, gradients", plan["nvme"], paths)


def _make_tier(
    in_files: Sequence[Slice],
    in_memory: Sequence[Slice],
    on_device: Sequence[Slice],
    device: torch.device,
    options: NvmeOptions,
    trace: Trace | None,
) -> Tier:
    """Return the tier that keeps the slices ``in_files``, ``in_memory`` (of the host) and ``on_device`` (not
    offloaded): a `SplitTier` if two of these have slices. Files and ``on_device`` cannot be combined.

    On the CPU, ``on_device`` slices are in host memory that counts as the device's. What an accelerator updates is
    visited first, so that the host updates the rest beside it. The caller closes the tier; if this raises, nothing
    stays open: OffloadError if the folders cannot be used, OSError if there is not enough memory.
    """
    if in_files:
        files = NvmeTier(in_files, options, trace)
        try:
            return SplitTier(files, HostTier(in_memory), len(in_files)) if in_memory else files
        except BaseException:
            files.close()
            raise
    host = HostTier(in_memory)
    if not on_device:
        return host
    away = device.type != "cpu"
    rest = DeviceTier(on_device, device) if away else HostTier(on_device, on_device=True)
    return SplitTier(host, rest, len(in_memory), rest_first=away)


def _make_gradients(
    shards: Sequence[ShardPlan],
    slices: Sequence[Slice],
    kept: Sequence[Slice],
    device: torch.device,
    where: GradientPlace,
    options: NvmeOptions,
    pin: bool,
    trace: Trace | None,
) -> Gradients:
    """Return the object that keeps the gradients of ``shards``, as ``where`` says: with the caller, in host memory (but
    on ``device`` for the slices ``kept`` there), or in files, with ``options``. It allocates memory, pinned with
    ``pin``, and opens files; ``trace``, if not None, records its transfers.
    """
    if where == "caller":
        return CallerGradients(shards, slices)
    if where == "host" and kept:
        return SplitGradients(shards, slices, kept, device, pin=pin, trace=trace)
    if where == "host":
        return HostGradients(shards, slices, device, pin=pin, trace=trace)
    return NvmeGradients(shards, slices, device, options, pin=pin, trace=trace)
