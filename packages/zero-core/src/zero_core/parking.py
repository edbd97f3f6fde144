"""Model states that wait in host memory while something else needs the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .errors import UsageError

if TYPE_CHECKING:
    from zero_partition import Partition, ShardedOptimizer, Unit

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: optimizer states, masters, the weights that forward reads, gradients (both)."""


class ParkedStates:
    """Takes the bytes of chosen states off the device; `bring_back` puts them where they were.

    Storages keep their identity and are emptied, so every view of them is right again afterwards. Parameters that
    the user could read meanwhile are placeholders of NaN.
    """

    def __init__(
        self, partition: Partition, optimizer: ShardedOptimizer | None, kinds: Collection[str], pin: bool
    ) -> None:
        self._optimizer = optimizer
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._shown: list[Unit] = []
        self._pin = pin and partition.device.type != "cpu"
        tensors: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
            "optim_states": lambda: _optimizer_states(optimizer),
            "hp_params": lambda: (unit.master for unit in partition.units if unit.master is not None),
            "lp_params": lambda: self._weights(partition),
            "lp_grads": lambda: _gradients(partition),
            "contiguous_grad_buffer": lambda: _gradients(partition),
        }
        for kind in KINDS:
            if kind in kinds:
                self._park(tensors[kind]())

    @property
    def nbytes(self) -> int:
        """Bytes that wait in host memory."""
        return sum(host.nbytes for _, host in self._held)

    def bring_back(self) -> None:
        """Everything is where it was; may be called twice."""
        for storage, host in self._held:
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host)
        self._held.clear()
        for unit in self._shown:
            unit.show()
        self._shown.clear()
        if self._optimizer is not None:
            state = self._optimizer.state
            for tensor in list(state):
                state[tensor] = {**state[tensor]}  # a new dict: optimizers that remember addresses look again

    def _park(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._pin)
            host.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._held.append((storage, host))

    def _weights(self, partition: Partition) -> Iterator[torch.Tensor]:
        for unit in partition.units:
            if not unit.releasable:
                unit.hide()
                self._shown.append(unit)
                yield unit.flat
            yield partition.residency.borrow(unit.name)
            partition.residency.give_back(unit.name, dirty=False)


def kinds_of(include: Iterable[Any] | None) -> set[str]:
    """The names in ``include`` (strings, or an enumeration's members); all when it is None.

    Raises `UsageError` for another.
    """
    if include is None:
        return set(KINDS)
    names = {str(getattr(item, "value", item)) for item in include}
    unknown = sorted(names - set(KINDS))
    if unknown:
        raise UsageError(
            f"engine.offload_states(include=…): expected names among {', '.join(KINDS)}, got {unknown[0]!r}"
        )
    return names


def _optimizer_states(optimizer: ShardedOptimizer | None) -> Iterator[torch.Tensor]:
    if optimizer is not None:
        for owned in optimizer.fragments:
            for value in optimizer.state.get(owned.tensor, {}).values():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield value


def _gradients(partition: Partition) -> Iterator[torch.Tensor]:
    for gradients in partition.runtime.gradients.values():
        yield from gradients.tensors()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
