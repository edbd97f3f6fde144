"""A parameter of which each rank holds a shard, from the `Init` that builds its model until a unit owns it."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from zero_comm import Group, Tag

from .host_facts import is_fake
from .placeholder import Placeholders
from .released import mark_present

_RECORD = "_zero_sharded"  # the one attribute that a parameter carries, from Init until a unit owns it
_NUMBERS = itertools.count()


class NewShard(Protocol):
    """Makes the memory of a shard: 1-D, ``numel`` elements of any value."""

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device, /) -> torch.Tensor: ...


class _Context(Protocol):
    """The `Init` in which a parameter was sharded, while it is open."""

    def meet(self, records: list[ShardedParameter]) -> None:
        """Raise `DesyncError` on every rank where not all are about to gather ``records``. Collective."""


class ShardedParameter:
    """A parameter of which this rank holds 1/N: ``shard`` (1-D, padded), in the dtype that the user's code asked for
    until `convert`.

    It is full at first. `reshard` takes the present values and releases it, `gather` makes it full again so that code
    can work on it. ``context``: the `Init` that has sharded it.

    Attributes:
        number: position in the order of creation, which is the same on all ranks.
        pinned: the user has gathered it.
    """

    def __init__(self, parameter: nn.Parameter, group: Group, new_shard: NewShard, context: _Context) -> None:
        self._context = weakref.ref(context)
        self._parameter = weakref.ref(parameter)
        self._group = group
        self._new_shard = new_shard
        self._shape = parameter.shape
        self.number = next(_NUMBERS)
        self.is_full = True
        self.pinned = False
        setattr(parameter, _RECORD, self)

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self._shape.numel()

    def reshard(self) -> None:
        """Keep this rank's slice and make the parameter a placeholder; nothing when it is one already."""
        parameter = self._parameter()
        if parameter is None or not self.is_full:
            return
        with torch._C.DisableTorchFunction():  # Init does not take this for a use of the parameter
            self._shape = parameter.shape
            size = -(-self.numel // self._group.world_size)
            part = parameter.data.reshape(-1)[self._group.rank * size : (self._group.rank + 1) * size]
            self.shard = self._new_shard(size, parameter.dtype, parameter.device)
            self.shard[: part.numel()].copy_(part)
            self.shard[part.numel() :].zero_()
            self._release(parameter)

    def forget_changes(self) -> None:
        """Make the parameter a placeholder again with the values that it had when it was sharded last."""
        parameter = self._parameter()
        if parameter is not None and self.is_full:
            with torch._C.DisableTorchFunction():
                self._release(parameter)

    def convert(self, dtype: torch.dtype) -> None:
        """Reshard the parameter and have it in ``dtype`` from now on."""
        self.reshard()
        parameter = self._parameter()
        if parameter is not None and self.shard.dtype != dtype:
            before, self.shard = self.shard, self._new_shard(self.shard.numel(), dtype, self.shard.device)
            self.shard.copy_(before)
            self._release(parameter)

    def _release(self, parameter: nn.Parameter) -> None:
        named = [("built inside Init", parameter)]
        self._placeholder = Placeholders(named, self.shard.dtype, self.shard.device)
        self._placeholder.install()
        self.is_full = False

    def meet(self, others: Sequence[ShardedParameter]) -> None:
        """Raise `DesyncError` on every rank, while the context is open, where not all are about to gather this
        parameter and ``others``. Collective."""
        context = self._context()
        if context is not None:
            context.meet([self, *others])

    def gather(self) -> None:
        """Make the parameter full, in memory of its own. Collective."""
        parameter = self._parameter()
        if parameter is not None and not self.is_full:
            with torch._C.DisableTorchFunction():
                values = self.read()
                mark_present([parameter])
                parameter.data = values
            self.is_full = True

    def take_from(self, rank: int) -> None:
        """Give every rank the values that ``rank`` has in the full parameter. Collective."""
        parameter = self._parameter()
        if parameter is not None and self.is_full:
            with torch._C.DisableTorchFunction():
                values = parameter.data.contiguous()
                self._group.broadcast(values, rank, Tag("broadcast", "a parameter built inside Init")).wait()
                parameter.data = values

    def digest(self) -> str:
        """A hash of dtype, shape and values of the full parameter; without values where it has no memory."""
        parameter = self._parameter()
        if parameter is None:
            return ""
        kind = f"{parameter.dtype} {tuple(parameter.shape)}".encode()
        if is_fake(parameter.data):
            return hashlib.sha256(kind).hexdigest()[:16]
        with torch._C.DisableTorchFunction():
            values = parameter.data.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        return hashlib.sha256(kind + hashlib.sha256(values.data).digest()).hexdigest()[:16]

    def replaced(self) -> None:
        """The parameter's data was assigned: it is full with these values."""
        parameter = self._parameter()
        if parameter is not None:
            mark_present([parameter])
        self.is_full = True

    def read(self) -> torch.Tensor:
        """Return the full values in the parameter's shape; the parameter itself stays as it is. Collective."""
        parameter = self._parameter()
        if self.is_full and parameter is not None:
            return parameter.data
        self._placeholder.verify()
        full = self.shard.new_empty(self.shard.numel() * self._group.world_size)
        self._group.all_gather(full, self.shard, Tag("gather", "a parameter built inside Init")).wait()
        return full[: self.numel].view(self._shape)


def sharded_record(parameter: object) -> ShardedParameter | None:
    """Return the record of a parameter that an `Init` context has sharded and no unit owns yet."""
    return getattr(parameter, _RECORD, None) if isinstance(parameter, nn.Parameter) else None


def forget_record(parameter: nn.Parameter) -> None:
    """A unit owns the parameter from now on."""
    delattr(parameter, _RECORD)


def in_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``numel`` elements of any value (a `NewShard`)."""
    return torch.empty(numel, dtype=dtype, device=device)
