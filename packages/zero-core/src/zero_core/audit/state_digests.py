"""Checks of each rank's own state: nothing changes it between two steps, and weights equal their rounded masters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zero_partition import DeviceResidency, Fragment, Unit

from ..checkpoint.fragments import has_own_master, master_fragments, shard_fragments
from ..state import TrainingState
from .digests import digest, same_bits
from .holdings import kept_on_device


@dataclass(frozen=True)
class TensorDigest:
    """A tensor that nothing may change before the next step, with its digest and version counter."""

    name: str
    kind: str
    tensor: torch.Tensor
    digest: str
    version: int

    @property
    def changed(self) -> bool:
        """Return whether the tensor's bytes changed although no operation of torch wrote it."""
        return self.tensor._version == self.version and digest(self.tensor) != self.digest


@dataclass(frozen=True)
class TierDigests:
    """The digests of this rank's states on a tier, by (parameter, kind), and how often the tier had been written."""

    digests: dict[tuple[str, str], str]
    writes: int


class StateDigests:
    """Digests of this rank's masters, released weights and optimizer states, taken by the constructor after a step. On
    the device, users reach these tensors only through the engine, whose writes change their version counters."""

    def __init__(self, state: TrainingState) -> None:
        states = state.partition.states  # read first: an update that still writes weights has ended then
        self._on_tier = None if states is None else TierDigests(tier_digests(state), states.writes)
        self._on_device = list(_on_device(state))

    def changed(self, state: TrainingState, now: dict[tuple[str, str], str]) -> Iterator[str]:
        """Yield a message for each tensor whose bytes have changed since the constructor although no write was counted,
        of the tensor or of its tier. ``now``: the present `tier_digests`, by (parameter, kind)."""
        for one in self._on_device:
            if one.changed:
                yield f"{one.kind} '{one.name}' changed since the last step"
        states, then = state.partition.states, self._on_tier
        if states is None or then is None or states.writes != then.writes:
            return
        for (name, kind), before in then.digests.items():
            if now.get((name, kind), before) != before:
                yield f"{kind} '{name}' changed on its tier since the last step"


def tier_digests(state: TrainingState, unpublished: list[str] | None = None) -> dict[tuple[str, str], str]:
    """Return digests of this rank's states on a tier, by (parameter, kind), reading them once; empty without a tier. To
    the list ``unpublished``, if any, are added the parameters whose weights differ from their rounded masters on the
    tier."""
    states, found = state.partition.states, {}
    if states is None:
        return {}
    weights = _Weights(state)
    for name, kept in states.states():
        for kind, value in kept.items():
            found[name, kind] = digest(value)
        if unpublished is not None and "master" in kept and not weights.equal_rounded(name, kept["master"]):
            unpublished.append(name)
    weights.release()
    return found


def unpublished(state: TrainingState) -> Iterator[str]:
    """Yield the names of trained parameters whose weights in this rank's shard differ from their rounded masters, if
    those are on the device, or from the gathered weights, if those are never released."""
    parts = state.partition
    for unit in parts.units:
        if not unit.plan.trainable:
            continue
        masters = {} if unit.states is not None or not has_own_master(unit) else _masters(unit, parts.rank)
        start, end = unit.layout.shard_range(parts.rank)
        shard = parts.residency.acquire(unit.name) if masters or not unit.releasable else None
        if shard is None:
            continue
        gathered = None if unit.releasable else unit.flat[start:end]
        for fragment, weights in shard_fragments(unit, shard, parts.rank):
            name = fragment.entry.name
            if name in masters and not same_bits(masters[name].to(weights.device, weights.dtype), weights):
                yield name
            elif gathered is not None and gathered.data_ptr() != shard.data_ptr():
                if not same_bits(gathered[fragment.shard_offset : fragment.shard_offset + fragment.length], weights):
                    yield name
        parts.residency.release(unit.name, dirty=False)


class _Weights:
    """This rank's weights by parameter. It holds the shard of one unit at a time, until `release` or a parameter of
    another."""

    def __init__(self, state: TrainingState) -> None:
        self._residency, rank = state.partition.residency, state.partition.rank
        self._places: dict[str, tuple[Unit, Fragment]] = {
            fragment.entry.name: (unit, fragment)
            for unit in state.partition.units
            if unit.plan.trainable
            for fragment in unit.layout.fragments(rank)
        }
        self._acquired: tuple[Unit, torch.Tensor] | None = None

    def equal_rounded(self, name: str, master: torch.Tensor) -> bool:
        """Return whether this rank's weights of the parameter ``name`` are bitwise ``master``, rounded."""
        unit, fragment = self._places[name]
        if self._acquired is None or self._acquired[0] is not unit:
            self.release()
            self._acquired = (unit, self._residency.acquire(unit.name))
        weights = self._acquired[1][fragment.shard_offset : fragment.shard_offset + fragment.length]
        return same_bits(master.to(weights.device, weights.dtype), weights)

    def release(self) -> None:
        """Release the shard that is held, if any."""
        if self._acquired is not None:
            self._residency.release(self._acquired[0].name, dirty=False)
            self._acquired = None


def _on_device(state: TrainingState) -> Iterator[TensorDigest]:
    """Yield digests of this rank's masters and optimizer states on the device, and of its shards there if weights are
    released."""
    for name, kind, tensor in kept_on_device(state):
        yield TensorDigest(name, kind, tensor, digest(tensor), tensor._version)
    parts = state.partition
    for unit in parts.units:
        if unit.releasable and unit.plan.trainable and isinstance(parts.residency, DeviceResidency):
            shard = parts.residency.acquire(unit.name)
            for fragment, piece in shard_fragments(unit, shard, parts.rank):
                name = f"{fragment.entry.name}[{fragment.param_offset}:]"
                yield TensorDigest(name, "weight", piece, digest(piece), piece._version)


def _masters(unit: Unit, rank: int) -> dict[str, torch.Tensor]:
    """Return the fragments of the unit's master that ``rank`` owns, by parameter name."""
    return {fragment.entry.name: piece for fragment, piece in master_fragments(unit, range(rank, rank + 1))}
