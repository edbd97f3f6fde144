"""Copies for an update that runs beside its caller: of the weights, and of the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._memory import HostBlock
from ..ends import HostUse
from .plans import ShardPlan

__all__ = ["Mirror", "copy_options"]


class Mirror:
    """A copy of all weights in host memory, into which an update writes the new weights as if it were its `Weights`.
    `allocate` must be called before `borrow`. ``nbytes``: its size in bytes, 0 before `allocate` and after `close`.
    """

    def __init__(self) -> None:
        self._views: dict[str, torch.Tensor] = {}
        self.nbytes = 0

    @staticmethod
    def bytes_of(shards: Sequence[ShardPlan]) -> int:
        """Return the bytes of the shards' weights."""
        return sum(shard.numel * shard.dtype.itemsize for shard in shards)

    def allocate(self, shards: Sequence[ShardPlan], *, pin: bool) -> None:
        """Allocate one block of host memory for the weights of all shards, pinned if ``pin``; its content is zero. Call
        it once, before the first `borrow`.
        """
        self.nbytes = self.bytes_of(shards)
        parts = tuple((shard.name, self.bytes_of([shard])) for shard in shards)
        block = HostBlock(self.nbytes, HostUse("weights that wait for their step", pin=pin, parts=parts))
        position = 0
        for shard in sorted(shards, key=lambda shard: -shard.dtype.itemsize):
            self._views[shard.name] = block.view(position, shard.numel, shard.dtype)
            position += shard.numel * shard.dtype.itemsize

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the copy of a shard's weights (1-D), writable at any time; ``fresh`` changes nothing."""
        return self._views[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Do nothing: the copy stays."""

    def close(self) -> None:
        """Free the memory; tensors over it keep it alive."""
        self._views.clear()
        self.nbytes = 0


def copy_options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of each parameter group's options, without ``params``, also of the lists and tensors in them:
    schedulers change the originals while a step runs.
    """
    return [{key: _copy_option(value) for key, value in group.items() if key != "params"} for group in groups]


def _copy_option(value: Any) -> Any:
    """Return a copy of an option's value: of a tensor, and of all that lists, tuples and dicts hold; other values are
    returned themselves.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy_option(item) for key, item in value.items()}
    return type(value)(map(_copy_option, value)) if type(value) in (list, tuple) else value
