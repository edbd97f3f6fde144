"""Stores that keep the inputs of segments until backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from zero_comm import Group, Tag
from zero_core.errors import UsageError

Kept = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


class ActivationStore(Protocol):
    """Turns an input into the tensor that is kept, and a function that makes the input of it again.

    ``position`` counts the inputs of one segment.
    """

    def keep(self, tensor: torch.Tensor, position: int) -> Kept: ...
    def reset(self) -> None: ...


class PlainStore:
    """Keeps the input itself."""

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """The tensor, as it is."""
        return tensor, _same

    def reset(self) -> None:
        """Nothing to give back."""


class PartitionedStore:
    """Keeps this rank's part of an input that all ranks of ``process_group`` have; the parts go to ``inner``."""

    def __init__(self, process_group: dist.ProcessGroup, inner: ActivationStore) -> None:
        self._group = Group(process_group)
        self._inner = inner

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """The part, padded to equal sizes; inputs of fewer elements than ranks are replicated."""
        ranks, rank = self._group.world_size, self._group.rank
        if ranks == 1 or tensor.numel() < ranks:
            return self._inner.keep(tensor, position)
        size = -(-tensor.numel() // ranks)
        own = tensor.reshape(-1)[rank * size : (rank + 1) * size]
        part = tensor.new_zeros(size)
        part[: own.numel()].copy_(own)
        kept, restore = self._inner.keep(part, position)
        shape = tensor.shape
        return kept, lambda stored: self._gathered(restore(stored), shape)

    def reset(self) -> None:
        """Give the inner buffers back."""
        self._inner.reset()

    def _gathered(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        full = part.new_empty(part.numel() * self._group.world_size)
        self._group.all_gather(full, part, Tag("gather", "a checkpointed activation")).wait()
        return full[: shape.numel()].view(shape)


class ContiguousStore:
    """Copies inputs of one size into one buffer with room for ``number`` segments, so that memory is not fragmented."""

    def __init__(self, number: int) -> None:
        if number < 1:
            raise UsageError(
                "activation_checkpointing.contiguous_memory_optimization needs number_checkpoints, the number of "
                f"segments that wait for backward at once: expected an integer >= 1, got {number}"
            )
        self._number = number
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], _Slots] = {}

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """A free place of the buffer for inputs like this one; raises `UsageError` when all are taken."""
        key = (position, tensor.numel(), tensor.dtype, tensor.device)
        if key not in self._buffers:
            self._buffers[key] = _Slots(tensor, self._number)
        slot = self._buffers[key].take(tensor)
        return slot.copy_(tensor), _same

    def reset(self) -> None:
        """Let the buffers go; places in use keep theirs alive."""
        self._buffers.clear()


class _Slots:
    """One buffer and its free places."""

    def __init__(self, like: torch.Tensor, number: int) -> None:
        self._memory = like.new_empty(number, like.numel())
        self._free = list(range(number))[::-1]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._free:
            raise UsageError(
                f"{self._memory.shape[0]} segments with an input of shape {tuple(tensor.shape)} wait for backward "
                "already: raise activation_checkpointing.number_checkpoints, or call checkpointing.reset() after "
                "forward passes without backward"
            )
        place = self._free.pop()
        slot = self._memory[place].view(tensor.shape)
        weakref.finalize(slot, self._free.append, place).atexit = False
        return slot


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
