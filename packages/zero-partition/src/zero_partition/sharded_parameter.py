"""A parameter of which each rank holds a shard, from the `Init` that builds its model until a unit owns it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from zero_comm import Group, Tag

from .host_facts import is_fake
from .ownership import attach_record, init_record
from .placeholder import Placeholders
from .released import mark_present
from .shared_storage import held_elsewhere


class NewShard(Protocol):
    """Allocates the memory of a shard."""

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device, /) -> torch.Tensor:
        """Return a new uninitialised 1-D tensor of ``numel`` elements."""


class _Context(Protocol):
    """The open `Init` context in which a parameter was sharded."""

    def meet(self, records: list[ShardedParameter]) -> None:
        """Raise `DesyncError` on every rank unless all ranks are about to gather the same ``records``. Collective."""


class _Numbers:
    """Gives each `ShardedParameter` record a number, in the order of creation.

    Attributes:
        next: the number that the next record gets.
        records: by number, the records that still exist.
    """

    def __init__(self) -> None:
        self.next = 0
        self.records: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()

    def assign(self, record: ShardedParameter) -> int:
        """Register ``record``, without keeping it alive, and return its number."""
        number, self.next = self.next, self.next + 1
        self.records[number] = record
        return number


_NUMBERS = _Numbers()


class ShardedParameter:
    """The record of a parameter that `Init` has sharded: this rank's ``shard`` (1-D, padded to 1/N of the elements).

    The parameter is full at first. `reshard` stores the shard of its present values and releases it, so that it is a
    placeholder; `gather` makes it full again. Its dtype is that of the user's code until `convert`. Copies and pickles
    of the parameter have no record. The record refers weakly to ``parameter``: once that is gone, methods do nothing to
    it.

    ``group``: the ranks that have a shard each. ``new_shard``: allocates shards. ``context``: the `Init` that has
    sharded it, None for none.

    Attributes:
        name: the parameter's name as far as it is known, for messages.
        number: position in the order of creation, which is the same on all ranks inside an `Init`.
        is_full: the parameter has its full values, not a placeholder.
        pinned: the user has gathered it.
    """

    def __init__(self, parameter: nn.Parameter, group: Group, new_shard: NewShard, context: _Context | None) -> None:
        self._context: Callable[[], _Context | None] = _no_referent if context is None else weakref.ref(context)
        self._parameter: Callable[[], nn.Parameter | None] = weakref.ref(parameter)
        self._group = group
        self._new_shard = new_shard
        self._shape = parameter.shape
        self._shard: torch.Tensor | None = None
        self.name = f"of shape {tuple(parameter.shape)}"
        self._is_named = False
        self.number = _NUMBERS.assign(self)
        self.is_full = True
        self.pinned = False
        attach_record(parameter, self)

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        """Return None, as a copied parameter has no record."""
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return what pickle writes: None, as an unpickled parameter has no record."""
        return type(None), ()

    def set_name(self, name: str) -> None:
        """Set the parameter's name to ``name`` unless the present name has more components, as it then comes from a
        module further out."""
        if not self._is_named or name.count(".") >= self.name.count("."):
            self.name, self._is_named = name, True

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return self._shape.numel()

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard (1-D, padded with zeros): the stored one if the parameter is released, else a new tensor
        with this rank's slice of the present values."""
        parameter = self._parameter()
        if parameter is None or not self.is_full:
            assert self._shard is not None
            return self._shard
        with torch._C.DisableTorchFunction():  # Init does not take this for a use of the parameter
            size = -(-self.numel // self._group.world_size)
            part = parameter.data.reshape(-1)[self._group.rank * size : (self._group.rank + 1) * size]
            shard = self._new_shard(size, parameter.dtype, parameter.device)
            shard[: part.numel()].copy_(part)
            shard[part.numel() :].zero_()
        return shard

    def reshard(self) -> None:
        """Store this rank's shard of the present values and release the parameter; do nothing if it is not full."""
        parameter = self._parameter()
        if parameter is None or not self.is_full:
            return
        with torch._C.DisableTorchFunction():
            self._shape = parameter.shape
            self._release(parameter, self.shard)

    def forget_changes(self) -> None:
        """Release a full parameter but keep the shard from before it was gathered, so that changes since are dropped.
        Do nothing if the parameter is not full or has never been sharded."""
        parameter = self._parameter()
        if parameter is not None and self.is_full and self._shard is not None:
            with torch._C.DisableTorchFunction():
                self._release(parameter, self._shard)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the shard and the placeholder of a released parameter to ``dtype``.

        Does nothing to a full parameter, whose memory other tensors may share.
        """
        parameter = self._parameter()
        if parameter is not None and not self.is_full and self.shard.dtype != dtype:
            shard = self._new_shard(self.shard.numel(), dtype, self.shard.device)
            self._release(parameter, shard.copy_(self.shard))

    def forget(self) -> None:
        """Drop the reference to the parameter, which an engine owns from now on, even if the user has gathered it."""
        self._parameter = _no_referent

    def released_copy(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """Return a new released parameter of class ``kind`` with a record of its own, whose shard is a copy of this
        one's. Only while this parameter is released and exists."""
        original = self._parameter()
        assert original is not None
        with torch._C.DisableTorchFunction():
            made = kind(torch.empty_like(original.data), original.requires_grad)  # a placeholder's strides: one element
            record = ShardedParameter(made, self._group, self._new_shard, self._context())
            shard = self._new_shard(self.shard.numel(), self.shard.dtype, self.shard.device)
            record.set_name(f"a copy of {self.name}")
            record._release(made, shard.copy_(self.shard))
        return made

    def _release(self, parameter: nn.Parameter, shard: torch.Tensor) -> None:
        """Store ``shard`` and make ``parameter`` a placeholder of the shard's dtype; frees its memory unless other
        tensors share it."""
        self._shard = shard
        self._placeholder = Placeholders([(self.name, parameter)], shard.dtype, shard.device)
        self._placeholder.install()
        self.is_full = False

    def meet(self, others: Sequence[ShardedParameter]) -> None:
        """Check that all ranks are about to gather this parameter and ``others``, while the `Init` is open; do nothing
        once it is closed.

        Raises `DesyncError` on every rank if they are not. Collective.
        """
        context = self._context()
        if context is not None:
            context.meet([self, *others])

    def gather(self) -> None:
        """Make a released parameter full, in memory of its own; do nothing if it is full. Collective.

        Raises `ReleasedParameterError` if the placeholder was written.
        """
        parameter = self._parameter()
        if parameter is not None and not self.is_full:
            with torch._C.DisableTorchFunction():
                values = self.read()
                mark_present([parameter])
                parameter.data = values
            self.is_full = True

    def broadcast_from(self, rank: int) -> None:
        """Replace the values of a full parameter, on every rank, by those of rank ``rank``; do nothing to a released
        one. Collective.

        The values are written in place, or into new memory if the parameter is expanded from fewer elements.
        """
        parameter = self._parameter()
        if parameter is not None and self.is_full:
            with torch._C.DisableTorchFunction():
                present = parameter.data
                values = present.contiguous()
                self._group.broadcast(values, rank, Tag("broadcast", self.name)).wait()
                if values is not present and all(present.stride()):
                    present.copy_(values)  # other tensors may be in this memory
                elif values is not present:
                    parameter.data = values

    @property
    def kind(self) -> str:
        """The parameter's present dtype and shape as text, to compare them between ranks; "" if it is gone."""
        parameter = self._parameter()
        return "" if parameter is None else f"{parameter.dtype} {tuple(parameter.shape)}"

    def digest(self) -> str:
        """Return a hash of the full parameter's values as text, to compare them between ranks; "" if the parameter is
        gone or a fake tensor."""
        parameter = self._parameter()
        with torch._C.DisableTorchFunction():
            if parameter is None or is_fake(parameter.data):
                return ""
            values = parameter.data.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        return hashlib.sha256(values.data).hexdigest()[:16]

    def read(self) -> torch.Tensor:
        """Return the full values in the parameter's shape, without changing the parameter: its own memory if it is
        full, else new memory. Collective if it is released.

        Raises `ReleasedParameterError` if the placeholder was written.
        """
        parameter = self._parameter()
        if self.is_full and parameter is not None:
            return parameter.data
        self._placeholder.verify()
        full = self.shard.new_empty(self.shard.numel() * self._group.world_size)
        self._group.all_gather(full, self.shard, Tag("gather", self.name)).wait()
        return full[: self.numel].view(self._shape)


def sharded_record(parameter: object) -> ShardedParameter | None:
    """Return the record of a parameter that an `Init` context has sharded and no unit owns yet; None for any other
    object."""
    record: ShardedParameter | None = init_record(parameter)
    return record


def _no_referent() -> None:
    """Return None, in place of a weak reference to an object that is gone or was never there."""
    return None


def records_by_number(numbers: Sequence[int]) -> list[ShardedParameter]:
    """Return the records with the given ``numbers`` that still exist on this rank, in the order given."""
    return [record for number in numbers if (record := _NUMBERS.records.get(number)) is not None]


def next_number() -> int:
    """Return the number that the next record gets."""
    return _NUMBERS.next


def number_from(number: int) -> None:
    """Continue the numbering of new records at ``number``; no record may have that number or a later one."""
    _NUMBERS.next = number


def shared_with_others(records: Sequence[ShardedParameter]) -> list[bool]:
    """Return for each record whether other code holds a tensor or an array in its parameter's memory, as
    `held_elsewhere` finds; False where the parameter is gone."""
    parameters = [record._parameter() for record in records]
    alive = [parameter for parameter in parameters if parameter is not None]
    with torch._C.DisableTorchFunction():
        held = iter(held_elsewhere(alive))
    return [parameter is not None and next(held) for parameter in parameters]


def in_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new uninitialised 1-D tensor of ``numel`` elements on ``device``; the plain `NewShard`."""
    return torch.empty(numel, dtype=dtype, device=device)
