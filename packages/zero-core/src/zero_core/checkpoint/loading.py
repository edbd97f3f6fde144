"""Load a checkpoint into the engine's tensors. ``reading`` collects requests to read and the actions after them;
tensors that are added to it are filled when it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ckpt import Checkpoint, LoadReport, restore_any
from zero_ckpt.torch import torch_dtype
from zero_ckpt.torch.state_kinds import with_lists
from zero_comm import Tag
from zero_partition import DeviceResidency, OwnedFragment, Unit, gathered
from zero_partition.model_buffers import copy_values

from ..state import TrainingState
from .fragments import has_own_master, master_fragments, shard_fragments
from .names import WEIGHT_KINDS, check_names, load_report, named_parameters, replicated_parameters
from .progress import (
    check_virtual_ranks,
    engine_state,
    load_counters,
    load_hyperparameters,
    load_position,
    load_schedule,
)
from .quantized import quantized_moments, read_dequantized
from .rank_state import load_rank_state
from .reading import BatchedRead
from .saving import coordinator_of
from .tiers import tier_values

logger = logging.getLogger("zero_core")

CustomLoad = Callable[..., Any]
"""Called as ``f(src=tensors by name, dst=module)``; copies values into the module's parameters and buffers."""


@dataclass(frozen=True)
class LoadChoice:
    """What to load besides weights. ``strict``: model and checkpoint must have the same tensors. ``custom``: a function
    that loads the weights instead of the match by name. ``opened``: the checkpoint, if it is open already."""

    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool
    custom: CustomLoad | None = None
    opened: Checkpoint | None = None

    def __str__(self) -> str:
        """Return text on what is not loaded, or not by name; empty if everything is loaded by name."""
        words = {
            "without names that must fit": not self.strict,
            "without optimizer states": not self.optimizer,
            "without the schedule": not self.scheduler,
            "without counters": not self.counters,
            "weights by custom_load_fn": self.custom is not None,
        }
        return "".join(f", {text}" for text, said in words.items() if said)


def load(state: TrainingState, root: Path, tag: str | None, wanted: LoadChoice) -> tuple[LoadReport, dict[str, Any]]:
    """Load ``root/tag`` (None: the newest complete one) into the engine, whose gradients and accumulation are
    discarded. Return (report on each name, client state). Collective. Raises `zero_ckpt.CheckpointError`."""
    state.module.zero_grad()
    state.counters.accumulated = 0
    group = state.model_part.coordinator or coordinator_of(state)
    checkpoint, source = restore_any(root, partial(_fill, state, wanted), tag, coordinator=group, opened=wanted.opened)
    if wanted.custom is not None:
        _load_by_custom(state, wanted.custom, source)
    else:
        _all_gather_loaded_shards(state)
    if wanted.counters:
        load_counters(state, checkpoint)
    if wanted.scheduler:
        load_schedule(state, checkpoint)
    report = load_report(state, checkpoint, optimizer=wanted.optimizer)
    if state.reports:
        incomplete = report.defaulted or report.ignored or report.opened.skipped
        logger.log(logging.WARNING if incomplete else logging.INFO, "%s", report.summary())
    return report, engine_state(checkpoint)["client"]


def _fill(state: TrainingState, wanted: LoadChoice, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read this rank's part of a checkpoint into the engine. If a custom function is to load the weights, return all
    full tensors by name, else an empty dict. Does not communicate. Raises `MismatchError` if the checkpoint does not
    fit."""
    if wanted.strict and wanted.custom is None:
        check_names(state, checkpoint)
    if wanted.counters:
        check_virtual_ranks(state, checkpoint)
        load_position(state, checkpoint)
    reading = BatchedRead(checkpoint)
    _fill_units(state, reading, wanted)
    if wanted.optimizer:
        load_hyperparameters(state, checkpoint)
        _fill_states(state, reading)
        load_rank_state(state, reading)
    if wanted.custom is None:
        _fill_replicated(state, reading)
    reading.run()
    return {} if wanted.custom is None else _full_model(checkpoint)


def _fill_units(state: TrainingState, reading: BatchedRead, wanted: LoadChoice) -> None:
    """Add this rank's masters and, unless a custom function loads them, its weights to ``reading``. Reset tiers, and
    write their states from the checkpoint at once. Waits until running saves have copied what is overwritten."""
    parts, tensors = state.partition, reading.checkpoint.tensors
    parts.readers.wait()
    if parts.states is not None:
        parts.states.reset()
    for unit in parts.units:
        if wanted.custom is None:
            _fill_shard(state, reading, unit)
        if has_own_master(unit) or (wanted.custom is None and not _is_filled_by_gather(state, unit)):
            for fragment, piece in master_fragments(unit, parts.owned_ranks()):
                if (fragment.entry.name, "param") in tensors:
                    reading.add_weights(fragment.entry.name, fragment.param_offset, piece)
        if unit.states is not None:
            unit.states.write(
                tier_values(unit, unit.states, reading.checkpoint, parts.rank, optimizer=wanted.optimizer)
            )


def _is_filled_by_gather(state: TrainingState, unit: Unit) -> bool:
    """Return whether loading a unit's weights fills its master, which shares memory with its shard or its flat
    buffer."""
    parts = state.partition
    if unit.master is None or not isinstance(parts.residency, DeviceResidency):
        return False
    shard = parts.residency.acquire(unit.name)
    flat = 0 if unit.releasable else unit.flat.data_ptr()
    return unit.master.data_ptr() in (shard.data_ptr(), flat)


def _fill_shard(state: TrainingState, reading: BatchedRead, unit: Unit) -> None:
    """Add this rank's weights of a unit to ``reading``; if they are in a store, also run it, to read them now."""
    parts = state.partition
    shard = unit.borrow_shard()
    for fragment, piece in shard_fragments(unit, shard, parts.rank):
        if (fragment.entry.name, "param") in reading.checkpoint.tensors:
            reading.add_weights(fragment.entry.name, fragment.param_offset, piece)
    if not isinstance(parts.residency, DeviceResidency):  # the shard is borrowed from its store until it is released
        reading.run()
    unit.give_back_shard()


def _fill_states(state: TrainingState, reading: BatchedRead) -> None:
    """Replace the optimizer states of fragments that the checkpoint has, except on a tier. Their tensors are added to
    ``reading``."""
    if state.optimizer is None:
        return
    numbers_on = state.optimizer.number_devices()
    for owned in state.optimizer.fragments:
        if owned.unit.states is None and (owned.fragment.entry.name, "param") in reading.checkpoint.tensors:
            kept = _optimizer_state(reading, owned, numbers_on[owned.fragment.entry.name])
            state.optimizer.replace_state(owned, kept or None)
            if kept.keys() == {"step"}:
                reading.then(lambda owned=owned, kept=kept: _drop_unstarted(state, owned, kept))  # type: ignore[misc]


def _drop_unstarted(state: TrainingState, owned: OwnedFragment, kept: dict[str, Any]) -> None:
    """Remove the state of ``owned``, which is ``kept``, if no step was taken: a tier saves moments before the first."""
    if state.optimizer is not None and not kept["step"]:
        state.optimizer.replace_state(owned, None)


def _optimizer_state(reading: BatchedRead, owned: OwnedFragment, numbers_on: torch.device) -> dict[str, Any]:
    """Return the optimizer state of one fragment by key. Its tensors are added to ``reading``; quantized moments are
    read at once. ``numbers_on``: the device for scalars."""
    checkpoint, fragment, name = reading.checkpoint, owned.fragment, owned.fragment.entry.name
    state: dict[str, Any] = {}
    quantized = quantized_moments(checkpoint, name)
    for moment in quantized:
        numbers = read_dequantized(checkpoint, name, moment, fragment.param_offset, fragment.length)
        state[moment] = numbers.to(owned.tensor.device).view(owned.shape)
    for tensor_name, kind in checkpoint.tensors:
        if tensor_name != name or kind in WEIGHT_KINDS or kind.removesuffix(".scale").rpartition(".")[0] in quantized:
            continue
        entry = checkpoint.tensors[name, kind]
        if kind.endswith(".scalar"):
            value = torch.empty(1, dtype=torch_dtype(entry.dtype), device=numbers_on)
            reading.add(name, kind, 0, value)
            state[kind.removesuffix(".scalar")] = value.reshape(())
        else:
            same = tuple(entry.shape) == tuple(fragment.entry.shape)
            shape = owned.shape if same else entry.shape
            values = torch.empty(tuple(shape), dtype=torch_dtype(entry.dtype), device=owned.tensor.device)
            reading.add(name, kind, fragment.param_offset if same else 0, values.view(-1))
            state[kind] = values
    return with_lists(state)


def _fill_replicated(state: TrainingState, reading: BatchedRead) -> None:
    """Add buffers, and parameters that no unit holds, to ``reading``, where the checkpoint has them."""
    replicated = [(name, "buffer", b) for name, b in state.module.named_buffers() if type(b) is torch.Tensor]
    named = named_parameters(state.module)
    replicated += [(name, "param", tensor) for name, tensor in replicated_parameters(state, named).items()]
    for name, kind, tensor in replicated:
        if (name, kind) in reading.checkpoint.tensors:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
            reading.add(name, kind, 0, flat)
            reading.then(partial(copy_values, tensor, flat.view(tensor.shape), name))


def _full_model(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of the checkpoint in full, tied ones under all their names. Parameters are read
    from their masters, if there are any."""
    reading, found = BatchedRead(checkpoint), {}
    for (name, kind), entry in checkpoint.tensors.items():
        if kind in ("param", "buffer"):
            best = "master" if kind == "param" and (name, "master") in checkpoint.tensors else kind
            found[name] = torch.empty(entry.shape, dtype=torch_dtype(checkpoint.tensors[name, best].dtype))
            reading.add(name, best, 0, found[name].view(-1))
    reading.run()
    return {**found, **{alias: found[name] for alias, name in checkpoint.aliases.items() if name in found}}


def _load_by_custom(state: TrainingState, custom: CustomLoad, source: dict[str, torch.Tensor]) -> None:
    """Call the user's function with the gathered model and ``source``, the checkpoint's tensors by name; rank 0's
    result becomes all ranks'. Masters that round to the new weights stay. Collective."""
    module: nn.Module = state.module
    with gathered(state.partition, list(module.parameters()), modifier_rank=0), torch.no_grad():
        custom(src=source, dst=module)


def _all_gather_loaded_shards(state: TrainingState) -> None:
    """All-gather the units that are never released: each rank contributes the shard that it has read, and all get the
    full weights, in place. Returns when all have arrived. Collective."""
    parts = state.partition
    works = []
    for unit in parts.units:
        if not unit.releasable:
            start, end = unit.layout.shard_range(parts.rank)
            unit.flat[start:end].copy_(parts.residency.acquire(unit.name))
            parts.residency.release(unit.name, dirty=False)
            tag = Tag("checkpoint", unit.name, parts.runtime.step)
            works.append(parts.groups.gather.all_gather(unit.flat, unit.flat[start:end], tag))
    for work in works:
        work.wait()
