"""Digests of all data that every rank must hold alike: gathered weights, buffers, the layout, param groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_ckpt.torch.state_kinds import by_kind
from zero_partition import Unit
from zero_partition.shared_storage import overlapping

from ..checkpoint.fragments import has_own_master, master_fragments
from ..state import TrainingState
from .digests import digest, digest_of_data


@dataclass(frozen=True)
class Held:
    """Data that all ranks must hold with equal bits: ``what`` (such as "weight") of ``name``, and its digest.
    ``shard``: the rank whose shard the data are in, None for data of no unit. ``checked``: that rank compares them with
    its master, so that its copy decides which ranks are wrong."""

    what: str
    name: str
    digest: str
    shard: int | None = None
    checked: bool = False

    @property
    def key(self) -> str:
        """Return what identifies the data on every rank, as text for messages and comparison."""
        return f"{self.what} '{self.name}'" + ("" if self.shard is None else f" (shard of rank {self.shard})")


class Buffers:
    """The model's buffers, and which were written since the engine was made. Those may differ between ranks, as may
    running statistics, which torch writes without changing a version counter, and what shares memory with them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions = {name: (id(b), b._version) for name, b in module.named_buffers()}

    def unwritten(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, buffer) for buffers that were neither written nor replaced since the constructor; running
        statistics, and what shares memory with other buffers that are left out, are left out."""
        running = {id(b) for m in self._module.modules() if isinstance(m, _NormBase) for b in m.buffers()}
        named = list(self._module.named_buffers())
        for together in ([named[n] for n in numbers] for numbers in overlapping([b for _, b in named])):
            if all(id(b) not in running and self._versions.get(name) == (id(b), b._version) for name, b in together):
                yield from ((name, buffer) for name, buffer in together if type(buffer) is torch.Tensor)


def replicated_data(state: TrainingState, buffers: Buffers) -> Iterator[Held]:
    """Yield all data that every rank must hold with equal bits: layout, hyperparameters, loss scale, unwritten buffers,
    weights that stay gathered and, at stage 0, masters and optimizer states on the device."""
    parts = state.partition
    yield Held("the layout of", "the model", digest_of_data([_layout_of(unit) for unit in parts.layout.units]))
    for number, group in enumerate(state.torch_optimizer.param_groups if state.torch_optimizer is not None else ()):
        plain = {key: value for key, value in group.items() if key != "params"}
        yield Held("the hyperparameters of", f"param_groups[{number}]", digest_of_data(plain))
    yield Held("the loss scale of", "the engine", digest_of_data(state.loss_scale()))
    for name, buffer in buffers.unwritten():
        yield Held("buffer", name, digest(buffer))
    for unit in parts.units:
        yield from _replicated_weights(state, unit)
    if parts.options.stage == 0:
        for name, kind, tensor in kept_on_device(state):
            yield Held(kind, name, digest(tensor))


def _layout_of(layout: Any) -> list[Any]:
    """Return the layout of a unit as plain data: its name, number of ranks and shard length, and each parameter's name,
    shape and offset."""
    entries = [[entry.name, list(entry.shape), entry.offset] for entry in layout.entries]
    return [layout.name, layout.world_size, layout.shard_numel, entries]


def _replicated_weights(state: TrainingState, unit: Unit) -> Iterator[Held]:
    """Yield the weights of ``unit`` if they stay gathered: one item for each fragment of each rank's shard."""
    if unit.releasable:
        return
    checked = has_own_master(unit) and state.partition.options.stage > 0  # against its master, by `unpublished`
    for rank in range(state.partition.world_size):
        base, _ = unit.layout.shard_range(rank)
        for fragment in unit.layout.fragments(rank):
            start = base + fragment.shard_offset
            value = unit.flat[start : start + fragment.length]
            yield Held("weight", fragment.entry.name, digest(value), rank, checked)


def kept_on_device(state: TrainingState) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name, kind, tensor) for this rank's masters and optimizer states on the device, one for each fragment. The
    name is the parameter's, with the fragment's first element, as in ``weight[128:]``."""
    parts = state.partition
    for unit in parts.units:
        if has_own_master(unit):
            for fragment, piece in master_fragments(unit, parts.owned_ranks()):
                yield f"{fragment.entry.name}[{fragment.param_offset}:]", "master", piece
    if state.optimizer is None:
        return
    for owned in state.optimizer.fragments:
        if owned.unit.states is None:
            for kind, value in by_kind(state.optimizer.state_of(owned)).items():
                if isinstance(value, torch.Tensor):
                    yield f"{owned.fragment.entry.name}[{owned.fragment.param_offset}:]", kind, value
