"""`StateIntervals`: what one rank writes to a checkpoint, as intervals (contiguous elements) of named full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_ckpt import CheckpointError, Interval
from zero_ckpt.torch import Stager, dtype_name, tensor_buffer
from zero_ckpt.torch.state_kinds import by_kind
from zero_offload import Sealed
from zero_partition import DeviceResidency, Fragment, OwnedFragment, Unit

from ..state import TrainingState
from .fragments import has_own_master, master_fragments, shard_fragments
from .names import replicated_parameters
from .rank_state import rank_intervals
from .tier_files import TierFiles
from .tiers import tier_intervals, weight_intervals


class StateIntervals:
    """The intervals of an engine's state that one rank writes. ``named``: the model's `named_parameters`; ``files``:
    those of its tiers, to link to; ``exclude_frozen``: leave frozen parameters out.

    ``replicated``: also write buffers and replicated parameters, which are equal on all ranks. ``every_replica``: every
    replica (copy of the sharded model) writes its own, for nodes that cannot read one another's files; else the first
    writes for all. ``follow``: `later` updates masters from the copied weights ([Note: masters follow later]).

    Call order: `everything` for a save before which training does not continue. For a background save: `memory` and
    `present` before the call returns, then `later` on any thread, before anything writes shards, masters or states.

    [Note: present and later] User code can write gathered weights and buffers at any time, so they are copied before
    the save returns. Only the engine writes shards, masters and states, in a step, so they are copied later. Writes to
    tensors that the user took from ``optimizer.state`` earlier are detected by their version counters.

    [Note: masters follow later] A write to weights that changes no version counter (NumPy, DLPack) reaches a master
    only when all weights are compared with it. A save compares them, since it stores both. Comparing takes ten times as
    long as copying, so a background save copies only the weights at first; the thread that copies masters compares."""

    def __init__(
        self,
        state: TrainingState,
        files: TierFiles,
        exclude_frozen: bool,
        named: Mapping[str, nn.Parameter],
        *,
        replicated: bool,
        every_replica: bool,
        follow: bool = False,
    ) -> None:
        parts = state.partition
        self._state, self._files, self._named = state, files, named
        self._replicated, self._every_replica = replicated, every_replica
        self._mastered = {unit.index: unit.weights_with_master for unit in parts.units} if follow else {}
        # the first replica holds, and writes, the same state as this rank's
        self._writes_nothing = not every_replica and parts.data_rank >= parts.world_size
        units = [] if self._writes_nothing else parts.units
        self._units = [unit for unit in units if unit.plan.trainable or not exclude_frozen]
        self._stager = Stager()
        self._linked: frozenset[str] = frozenset()
        self._sealed_weights: Sealed | None = None
        self._sealed_states: Sealed | None = None
        self._copied: list[tuple[Unit, torch.Tensor]] = []
        self._kept: list[_KeptStates] = []
        self._versions: dict[int, int] = {}

    def everything(self) -> Iterator[Interval]:
        """Yield all intervals. Data on a tier are read as intervals are written, so nothing may change until then."""
        if self._writes_nothing:
            return
        self._linked = self._files.flush_weights()
        self._sealed_weights, self._sealed_states = self._files.seal_weights(), self._files.seal_states()
        self._kept = self._states_now()
        for unit in self._units:
            yield from self._weights(unit)
            yield from self._masters_and_tier(unit)
        yield from self._state_intervals()
        yield from self._replicated_intervals()

    def settle_masters(self) -> None:
        """Update masters from weights that the user has edited, except the masters that `later` updates."""
        units = self._state.partition.units
        followed = {unit.index for unit in self._units if self._follows(unit)}
        self._state.partition.runtime.edits.settle_masters([unit for unit in units if unit.index not in followed])

    def memory(self) -> list[memoryview]:
        """Return the bytes of weights in host memory that user code can write, for the caller to copy for `later`."""
        if self._writes_nothing:
            return []
        self._copied = [(unit, weights) for unit in self._units if (weights := self._weights_to_copy(unit)) is not None]
        return [tensor_buffer(weights.detach()) for _, weights in self._copied]

    def _remember_versions(self) -> None:
        """Keep what `later` checks: references to states and the version counters of all tensors that it reads. Mark
        the work that devices have been given so far, for which alone `later` waits."""
        self._kept = self._states_now()
        read = [self._shard(unit) for unit in self._units if self._on_device and unit.releasable]
        read += [unit.master for unit in self._units if unit.master is not None and has_own_master(unit)]
        read += [value for kept in self._kept for value in kept.values.values() if isinstance(value, torch.Tensor)]
        self._versions = {id(tensor): tensor._version for tensor in read if not tensor.is_inference()}
        for device in {tensor.device for tensor in read}:
            self._stager.mark(device)

    def present(self) -> Iterator[Interval]:
        """Yield the intervals of data that user code or a forward pass may change at any time, and of weights in a
        store that cannot be linked, with their present values. Nothing if another replica writes for this rank."""
        if self._writes_nothing:
            return
        self._remember_versions()
        self._linked = self._files.flush_weights()
        copied = {unit.index for unit, _ in self._copied}
        for unit in self._units:
            if unit.index not in copied and not self._stays(unit):
                yield from self._weights(unit)
        yield from self._replicated_intervals()

    def later(self, copies: Sequence[memoryview]) -> Iterator[Interval]:
        """Yield the intervals that `present` has not. ``copies``: of the bytes that `memory` returned; shards, masters
        and states are read now. Raises `CheckpointError` for a tensor that was written since `present`."""
        if not self._writes_nothing:
            self._sealed_weights, self._sealed_states = self._files.seal_weights(), self._files.seal_states()
        for (unit, weights), copied in zip(self._copied, copies, strict=True):
            yield from self._copied_weights(unit, weights, copied)
        for unit in self._units:
            if self._stays(unit):
                if self._on_device:
                    self._check_unwritten(unit.name, "param", self._shard(unit))
                yield from self._weights(unit)
            if unit.master is not None and has_own_master(unit):
                self._check_unwritten(unit.name, "master", unit.master)
            yield from self._masters_and_tier(unit)
        for kept in self._kept:
            for key, value in kept.values.items():
                if isinstance(value, torch.Tensor):
                    self._check_unwritten(kept.part.entry.name, key, value)
        yield from self._state_intervals()

    @property
    def _on_device(self) -> bool:
        """Return whether parameter shards are on the device, in no store of a tier."""
        return isinstance(self._state.partition.residency, DeviceResidency)

    def _stays(self, unit: Unit) -> bool:
        """Return whether `later` can read a unit's weights where they are: shards on the device that only the engine
        writes, or shards in files that the save links (as `present` finds out)."""
        return unit.releasable if self._on_device else unit.name in self._linked

    def _follows(self, unit: Unit) -> bool:
        """Return whether `later` updates a unit's master from its copied weights."""
        return self._mastered.get(unit.index) is not None

    def _shard(self, unit: Unit) -> torch.Tensor:
        """Return this rank's shard of a unit, which is on the device. A shard in a store would have to be released."""
        return self._state.partition.residency.acquire(unit.name)

    def _weights_to_copy(self, unit: Unit) -> torch.Tensor | None:
        """Return, 1-D, the weights of a unit that `memory` offers: the full unit or this rank's shard, if user code can
        write them and they are contiguous in host memory; else None."""
        if not self._on_device or unit.releasable:
            return None
        weights = self._mastered[unit.index] if self._follows(unit) else self._shard(unit)
        return weights if weights is not None and weights.device.type == "cpu" and weights.is_contiguous() else None

    def _states_now(self) -> list[_KeptStates]:
        """Return the optimizer states on the device that this rank writes, by reference."""
        optimizer, parts, found = self._state.optimizer, self._state.partition, []
        for owned in () if optimizer is None else optimizer.fragments:
            part: Fragment | None = owned.fragment
            if parts.options.stage == 0 and not self._every_replica:  # every rank has all states, and writes a part
                part = owned.unit.layout.fragment_of(owned.fragment.entry, parts.rank)
            if part is not None and optimizer is not None:
                found.append(_KeptStates(owned, part, by_kind(optimizer.state_of(owned))))
        return found

    def _check_unwritten(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        """Raise `CheckpointError`, naming ``name`` and ``kind``, if ``tensor`` was written since `present`."""
        if not tensor.is_inference() and self._versions[id(tensor)] != tensor._version:
            raise CheckpointError(
                f"{name!r} ({kind}) was written before it was copied for the background save: ask optimizer.state "
                "again after a save, which waits, or write by engine.set_full_state"
            )

    def _copied_weights(self, unit: Unit, weights: torch.Tensor, copied: memoryview) -> Iterator[Interval]:
        """Yield the intervals of ``weights`` of a unit from ``copied``, their bytes; update the master from these if it
        `_follows`."""
        dtype, rank = weights.dtype, self._state.partition.rank
        if copied.nbytes and self._follows(unit):
            unit.update_master(torch.frombuffer(copied, dtype=dtype))
        first = 0 if weights.numel() != unit.layout.numel else unit.layout.shard_range(rank)[0]
        for fragment in unit.layout.fragments(rank):
            begin = (first + fragment.shard_offset) * dtype.itemsize
            data = copied[begin : begin + fragment.length * dtype.itemsize]
            entry = fragment.entry
            yield Interval(entry.name, "param", entry.shape, dtype_name(dtype), fragment.param_offset, data)

    def _weights(self, unit: Unit) -> Iterator[Interval]:
        """Yield the intervals of this rank's shard of a unit, on the device or in a store."""
        parts = self._state.partition
        if not self._on_device:
            yield from weight_intervals(parts.residency, unit, parts.rank, self._sealed_weights)
            return
        for fragment, piece in shard_fragments(unit, self._shard(unit), parts.rank):
            yield from self._fragment(fragment, "param", piece, stays=unit.releasable)

    def _masters_and_tier(self, unit: Unit) -> Iterator[Interval]:
        """Yield the intervals of a unit's master, if of another dtype than the weights, and of its states on a tier."""
        parts = self._state.partition
        if has_own_master(unit):
            ranks = parts.owned_ranks() if self._every_replica else range(parts.rank, parts.rank + 1)
            for fragment, piece in master_fragments(unit, ranks):
                yield from self._fragment(fragment, "master", piece, stays=True)
        if unit.states is not None:
            sealed, every_replica = self._sealed_states, self._every_replica
            yield from tier_intervals(unit.states, unit, parts.rank, sealed, every_replica=every_replica)

    def _state_intervals(self) -> Iterator[Interval]:
        """Yield the intervals of the optimizer states on the device: per element, of other shapes, and scalars."""
        for kept in self._kept:
            part, held, name = kept.part, kept.owned.fragment, kept.part.entry.name
            for key, value in kept.values.items():
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                has_elements = tensor.dim() > 0 or (not held.entry.shape and key != "step")
                if has_elements and tensor.numel() == held.length:
                    start = part.param_offset - held.param_offset
                    yield from self._fragment(part, key, tensor.reshape(-1)[start : start + part.length], stays=True)
                elif part.param_offset > 0 and not self._every_replica:
                    continue
                elif tensor.dim():
                    yield from self._stager.intervals(name, key, tensor.contiguous(), stays=True)
                else:
                    yield from self._stager.intervals(name, f"{key}.scalar", tensor.reshape(()), stays=True)

    def _replicated_intervals(self) -> Iterator[Interval]:
        """Yield the intervals of this rank's own rows of optimizer state and, if it writes them, of buffers and
        replicated parameters."""
        state = self._state
        if state.optimizer is not None:
            yield from rank_intervals(state, self._stager)
        if self._replicated:
            for name, buffer in state.module.named_buffers():
                yield from self._stager.intervals(name, "buffer", buffer.detach().contiguous())
            for name, parameter in replicated_parameters(state, self._named).items():
                yield from self._stager.intervals(name, "param", parameter.contiguous())

    def _fragment(self, fragment: Fragment, kind: str, piece: torch.Tensor, *, stays: bool) -> Iterator[Interval]:
        """Return the intervals of a fragment with elements ``piece``; ``stays``: not written before it is copied."""
        entry = fragment.entry
        return self._stager.intervals(
            entry.name, kind, piece, shape=entry.shape, offset=fragment.param_offset, stays=stays
        )


@dataclass(frozen=True)
class _KeptStates:
    """The states of the fragment ``owned``, by kind. This rank writes the elements of ``part`` and, if that begins the
    parameter, the states that are not per element."""

    owned: OwnedFragment
    part: Fragment
    values: Mapping[str, Any]
