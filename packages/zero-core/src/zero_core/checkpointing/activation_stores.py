"""Stores that keep the inputs of segments until backward. A segment is a part of the model that backward runs again;
``position`` is the number of an input in its segment, from 1."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from zero_comm import NO_STEP, Group, Tag
from zero_core.errors import UsageError

Kept = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


class ActivationStore(Protocol):
    """Stores inputs of segments. `keep` returns the tensor to store in place of an input, and the function that
    backward calls to turn that tensor into the input again."""

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """Return (tensor to store, function that restores ``tensor`` from it)."""

    def reset(self) -> None:
        """Free buffers that no stored tensor uses."""


class PlainStore:
    """An `ActivationStore` that stores the input itself."""

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """Return (``tensor``, the identity)."""
        return tensor, _identity

    def reset(self) -> None:
        """Do nothing."""


class PartitionedStore:
    """An `ActivationStore` that stores only this rank's shard of each input, by the store ``inner``. ``process_group``:
    the ranks to shard over, which have equal inputs."""

    def __init__(self, process_group: dist.ProcessGroup, inner: ActivationStore) -> None:
        self._group = Group(process_group)
        self._inner = inner

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """Return what ``inner`` stores of this rank's shard, padded to equal sizes, and the collective function that
        restores the input. An input with fewer elements than ranks is stored in full."""
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
        """Free the unused buffers of the inner store."""
        self._inner.reset()

    def _gathered(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the tensor of ``shape``, gathered from the ranks' padded shards, of which ``part`` is this rank's.
        Collective."""
        full = part.new_empty(part.numel() * self._group.world_size)
        self._group.all_gather(full, part, Tag("gather", "a checkpointed activation", NO_STEP)).wait()
        return full[: shape.numel()].view(shape)


class ContiguousStore:
    """An `ActivationStore` that copies inputs of one size into one buffer with a slot for each of ``number`` segments,
    so that memory is not fragmented. Raises `UsageError` for a ``number`` below 1."""

    def __init__(self, number: int) -> None:
        if number < 1:
            raise UsageError(
                "activation_checkpointing.contiguous_memory_optimization needs number_checkpoints, the number of "
                f"segments that wait for backward at once: expected an integer >= 1, got {number}"
            )
        self._number = number
        self._buffers: dict[tuple[int, int, torch.dtype, torch.device], _Slots] = {}

    def keep(self, tensor: torch.Tensor, position: int) -> Kept:
        """Return (a copy of ``tensor`` in a free slot, the identity). Raises `UsageError` if no slot is free."""
        key = (position, tensor.numel(), tensor.dtype, tensor.device)
        if key not in self._buffers:
            self._buffers[key] = _Slots(tensor, self._number)
        slot = self._buffers[key].take(tensor)
        return slot.copy_(tensor), _identity

    def reset(self) -> None:
        """Drop the buffers. Slots that are in use keep the memory of theirs."""
        self._buffers.clear()


class _Slots:
    """One buffer with ``number`` slots for tensors like ``like``; a slot is free again once its tensor is deleted."""

    def __init__(self, like: torch.Tensor, number: int) -> None:
        self._memory = like.new_empty(number, like.numel())
        self._free = list(range(number))[::-1]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a free slot, uninitialised, in the shape of ``tensor``. Raises `UsageError` if none is free."""
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


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself: restores inputs that are stored as they are."""
    return tensor
