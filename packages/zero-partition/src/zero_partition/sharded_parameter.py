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
from .ownership import init_record, note_record
from .placeholder import Placeholders
from .released import mark_present
from .shared_storage import held_elsewhere


class NewShard(Protocol):
    """Makes the memory of a shard: 1-D, ``numel`` elements of any value."""

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device, /) -> torch.Tensor: ...


class _Context(Protocol):
    """The `Init` in which a parameter was sharded, while it is open."""

    def meet(self, records: list[ShardedParameter]) -> None:
        """Raise `DesyncError` on every rank where not all are about to gather ``records``. Collective."""


class _Numbers:
    """Numbers records in the order of creation."""

    def __init__(self) -> None:
        self.next = 0
        self.records: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()

    def take(self, record: ShardedParameter) -> int:
        number, self.next = self.next, self.next + 1
        self.records[number] = record
        return number


_NUMBERS = _Numbers()


class ShardedParameter:
    """A parameter of which this rank holds 1/N: ``shard`` (1-D, padded), in the dtype that the user's code asked for
    until `convert`.

    It is full at first. `reshard` takes the present values and releases it, `gather` makes it full again so that code
    can work on it. ``context``: the `Init` that has sharded it.

    Copies and pickles of the parameter carry none.

    Attributes:
        name: the parameter's, as far as it is known, for messages.
        number: position in the order of creation, which is the same on all ranks inside an `Init`.
        pinned: the user has gathered it.
    """

    def __init__(self, parameter: nn.Parameter, group: Group, new_shard: NewShard, context: _Context | None) -> None:
        self._context: Callable[[], _Context | None] = _nothing if context is None else weakref.ref(context)
        self._parameter: Callable[[], nn.Parameter | None] = weakref.ref(parameter)
        self._group = group
        self._new_shard = new_shard
        self._shape = parameter.shape
        self._shard: torch.Tensor | None = None
        self.name = f"of shape {tuple(parameter.shape)}"
        self._is_named = False
        self.number = _NUMBERS.take(self)
        self.is_full = True
        self.pinned = False
        note_record(parameter, self)

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def named(self, name: str) -> None:
        """The parameter is called ``name`` from where code looks now; the one from furthest up stays."""
        if not self._is_named or name.count(".") >= self.name.count("."):
            self.name, self._is_named = name, True

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self._shape.numel()

    @property
    def shard(self) -> torch.Tensor:
        """This rank's slice (1-D, padded with zeros), of the present values where the parameter is full."""
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
        """Keep this rank's slice and make the parameter a placeholder; nothing when it is one already."""
        parameter = self._parameter()
        if parameter is None or not self.is_full:
            return
        with torch._C.DisableTorchFunction():
            self._shape = parameter.shape
            self._release(parameter, self.shard)

    def forget_changes(self) -> None:
        """Make the parameter a placeholder again with the values that it had when it was sharded last."""
        parameter = self._parameter()
        if parameter is not None and self.is_full and self._shard is not None:
            with torch._C.DisableTorchFunction():
                self._release(parameter, self._shard)

    def convert(self, dtype: torch.dtype) -> None:
        """Have a released parameter in ``dtype`` from now on; a full one, in whose memory other tensors are, keeps its
        own until a unit takes its values."""
        parameter = self._parameter()
        if parameter is not None and not self.is_full and self.shard.dtype != dtype:
            shard = self._new_shard(self.shard.numel(), dtype, self.shard.device)
            self._release(parameter, shard.copy_(self.shard))

    def forget(self) -> None:
        """An engine owns the parameter from now on, also where the user has it gathered."""
        self._parameter = _nothing

    def twin(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """A parameter of the class ``kind``, released, with a shard that is a copy of this released one's."""
        original = self._parameter()
        assert original is not None
        with torch._C.DisableTorchFunction():
            made = kind(torch.empty_like(original.data), original.requires_grad)  # a placeholder's strides: one element
            record = ShardedParameter(made, self._group, self._new_shard, self._context())
            shard = self._new_shard(self.shard.numel(), self.shard.dtype, self.shard.device)
            record.named(f"a copy of {self.name}")
            record._release(made, shard.copy_(self.shard))
        return made

    def _release(self, parameter: nn.Parameter, shard: torch.Tensor) -> None:
        self._shard = shard
        self._placeholder = Placeholders([(self.name, parameter)], shard.dtype, shard.device)
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
                present = parameter.data
                values = present.contiguous()
                self._group.broadcast(values, rank, Tag("broadcast", self.name)).wait()
                if values is not present and all(present.stride()):
                    present.copy_(values)  # other tensors may be in this memory
                elif values is not present:
                    parameter.data = values

    @property
    def kind(self) -> str:
        """The parameter's present dtype and shape."""
        parameter = self._parameter()
        return "" if parameter is None else f"{parameter.dtype} {tuple(parameter.shape)}"

    def digest(self) -> str:
        """A hash of the full parameter's values; "" where it has no memory."""
        parameter = self._parameter()
        with torch._C.DisableTorchFunction():
            if parameter is None or is_fake(parameter.data):
                return ""
            values = parameter.data.contiguous().cpu().view(-1).view(torch.uint8).numpy()
        return hashlib.sha256(values.data).hexdigest()[:16]

    def read(self) -> torch.Tensor:
        """Return the full values in the parameter's shape; the parameter itself stays as it is. Collective."""
        parameter = self._parameter()
        if self.is_full and parameter is not None:
            return parameter.data
        self._placeholder.verify()
        full = self.shard.new_empty(self.shard.numel() * self._group.world_size)
        self._group.all_gather(full, self.shard, Tag("gather", self.name)).wait()
        return full[: self.numel].view(self._shape)


def sharded_record(parameter: object) -> ShardedParameter | None:
    """Return the record of a parameter that an `Init` context has sharded and no unit owns yet."""
    record: ShardedParameter | None = init_record(parameter)
    return record


def _nothing() -> None:
    return None


def records_by_number(numbers: Sequence[int]) -> list[ShardedParameter]:
    """The records that have ``numbers`` on this rank, without those that it has not or no more."""
    return [record for number in numbers if (record := _NUMBERS.records.get(number)) is not None]


def next_number() -> int:
    """The number that the next record gets."""
    return _NUMBERS.next


def number_from(number: int) -> None:
    """Have the next record get ``number``, which no record has."""
    _NUMBERS.next = number


def shared_with_others(records: Sequence[ShardedParameter]) -> list[bool]:
    """Return for each record whether code holds a tensor or an array in its parameter's memory (`held_elsewhere`)."""
    parameters = [record._parameter() for record in records]
    alive = [parameter for parameter in parameters if parameter is not None]
    with torch._C.DisableTorchFunction():
        held = iter(held_elsewhere(alive))
    return [parameter is not None and next(held) for parameter in parameters]


def in_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``numel`` elements of any value (a `NewShard`)."""
    return torch.empty(numel, dtype=dtype, device=device)
