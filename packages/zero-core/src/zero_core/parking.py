"""Move model states off the device, to host memory or files, while other work needs it, and back. Kinds of state are
named as DeepSpeed does, see `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from zero_ckpt.torch.state_kinds import by_kind
from zero_offload import HostStore, NvmeStore, park, unpark
from zero_partition import DeviceResidency, Partition, ShardedOptimizer, Unit

from .errors import UsageError
from .offloading import Offloading
from .state import TrainingState

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: optimizer states, masters, the weights that forward reads, gradients (both)."""


class Parking:
    """Moves this rank's model states off the device and back. ``offloading``: opens the stores. Every call is
    collective."""

    def __init__(self, state: TrainingState, offloading: Offloading) -> None:
        self._state = state
        self._offloading = offloading
        self._parked: ParkedStates | None = None

    def offload(self, include: Iterable[Any] | None, device: str, pin: bool) -> None:
        """Move the states of the kinds in ``include`` (None: all) to ``device`` ("cpu" or "nvme") until `reload`.
        ``pin``: into pinned host memory. Raises `UsageError` for other kinds or devices, and if states are offloaded
        already."""
        state = self._state
        state.check_open("offload_states")
        kinds = kinds_of(include)
        store = self._offloading.parking_store(device, pin)
        state.partition.runtime.agree("offload states", "", None)
        self._parked = ParkedStates(state.partition, state.optimizer, kinds, store)
        state.lifetime.parked = True

    def reload(self) -> None:
        """Move back what `offload` moved, after which the engine can be used again; do nothing if it moved nothing."""
        if self._parked is not None:
            self._parked.bring_back()
            self._parked, self._state.lifetime.parked = None, False


class ParkedStates:
    """Moves states of the ``kinds`` off the device into ``store``, when it is constructed; `bring_back` restores them.
    Storages keep their identity and are emptied, so that all views of them are valid again afterwards. Parameters that
    the user could read meanwhile are placeholders of NaN. States on a tier stay there. Attribute ``nbytes``: bytes
    moved."""

    def __init__(
        self,
        partition: Partition,
        optimizer: ShardedOptimizer | None,
        kinds: Collection[str],
        store: HostStore | NvmeStore,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._shown: list[Unit] = []
        partition.finish_updates()
        found: dict[str, Callable[[], Iterable[tuple[str, torch.Tensor]]]] = {
            "optim_states": lambda: _optimizer_states(optimizer),
            "hp_params": lambda: ((u.name, u.master) for u in partition.units if u.master is not None),
            "lp_params": lambda: self._weights(partition),
            **dict.fromkeys(("lp_grads", "contiguous_grad_buffer"), lambda: _gradients(partition)),
        }
        self._held = {
            f"{kind} of {name}, {number}": tensor
            for kind in KINDS
            if kind in kinds
            for number, (name, tensor) in enumerate(found[kind]())
            if tensor.untyped_storage().nbytes()
        }
        try:
            self.nbytes = park(self._held, store)
        except BaseException:
            self.bring_back()
            raise

    def bring_back(self) -> None:
        """Move all states back to where they were, replace the placeholders by the weights, and close a store in files.
        Idempotent."""
        unpark(self._held, self._store)
        self._held.clear()
        if isinstance(self._store, NvmeStore):
            self._store.close()
        while self._shown:
            self._shown.pop().show()
        if self._optimizer is not None:
            for owned in self._optimizer.fragments:
                if kept := self._optimizer.state_of(owned):
                    self._optimizer.replace_state(owned, {**kept})  # a new dict: who remembers addresses looks again

    def _weights(self, partition: Partition) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (unit name, tensor) for weights and shards on the device. Replaces gathered weights by placeholders on
        the way."""
        for unit in partition.units:
            unit.drop_kept()
            if not unit.releasable:
                unit.hide()
                self._shown.append(unit)
                yield unit.name, unit.flat
            if isinstance(partition.residency, DeviceResidency):
                yield unit.name, partition.residency.acquire(unit.name)
            if (secondary := unit.route.secondary_shard) is not None:
                yield unit.name, secondary


def kinds_of(include: Iterable[Any] | None) -> set[str]:
    """Return the kinds of state in ``include``, strings or members of an enumeration; all of `KINDS` if it is None.
    Raises `UsageError` for a name that is not among them."""
    names = set(KINDS) if include is None else {str(getattr(item, "value", item)) for item in include}
    unknown = sorted(names - set(KINDS))
    if unknown:
        raise UsageError(
            f"engine.offload_states(include=…): expected names among {', '.join(KINDS)}, got {unknown[0]!r}"
        )
    return names


def _optimizer_states(optimizer: ShardedOptimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for the optimizer's states of this rank's fragments, without scalars; nothing for None."""
    if optimizer is not None:
        for owned in optimizer.fragments:
            for key, value in by_kind(optimizer.state_of(owned)).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield f"{owned.fragment.entry.name}/{key}", value


def _gradients(partition: Partition) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (unit name, tensor) for each buffer that holds gradients of a unit on the device."""
    for gradients in partition.runtime.gradients.values():
        yield from ((gradients.unit.name, tensor) for tensor in gradients.tensors())
