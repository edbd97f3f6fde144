"""Find edits of one unit's parameters by user code: replaced storage, in-place writes, casts."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
import xxhash
from torch import nn
from torch.autograd.graph import increment_version

from .host_facts import bytes_of, is_fake, untouched

_CHUNK = 1 << 22
_ODD = 2_654_435_761
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_UNKNOWN = -1  # no version counter says this
_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def plainly(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``call``, in which released parameters are the tensors that they are: it looks at them and asks for no values."""

    @functools.wraps(call)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch._C.DisableTorchFunctionSubclass():
            return call(*args, **kwargs)

    return wrapped


class UnitEdits:
    """Finds the parameters of a unit that are no longer what the unit made them, and keeps their new values.

    An address (`Tensor.is_set_to`), a dtype and a version counter per parameter tell; nothing is read on the device.
    A write through ``p.data`` leaves no trace there: the alias that `lend` keeps has a version counter too. Sums of the
    values, which `record` takes, tell what is written to memory that torch does not watch (NumPy, DLPack).

    [Note: edits wait for all ranks] A new value is `pending` until every rank has said that it found the same one. Only
    then it reaches shards and masters. A refused one leaves no trace in them.

    Attributes:
        pending: by parameter number, the full new values; None for a write into the view where that stays installed.
        refused: by parameter number, why the new values cannot be taken over.
        compares: whether the values of the next gather are summed, so that writes without a trace are found.
        writes_unseen: writes without a trace were found in this unit before.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.pending: dict[int, torch.Tensor | None] = {}
        self.refused: dict[int, str] = {}
        self.compares = False
        self.writes_unseen = False
        self._names = names
        self._parameters = parameters
        self._dtype = dtype
        self._dtypes = [dtype] * len(parameters)
        self._versions = [_version(p, 0) for p in parameters]
        self._sums: list[int] | None = None
        self._lent: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def versions(self) -> Sequence[int]:
        """The version counters that were seen last."""
        return self._versions

    @property
    def asks_for_a_look(self) -> bool:
        """Return whether addresses, dtypes and the parameters' own version counters do not tell all."""
        return self._sums is not None or self._is_lent_written()

    @property
    def recorded(self) -> bool:
        """Return whether `found` will compare values."""
        return self._sums is not None

    @plainly
    def lend(self, number: int, data: torch.Tensor) -> torch.Tensor:
        """Return what user code gets for ``data`` of a parameter: an alias of it, of which writes are found."""
        if data.is_inference():
            return data
        alias, _ = self._lent.get(number, (None, 0))
        if alias is None or not alias.is_set_to(data) or alias.dtype is not data.dtype:
            self._lent[number] = (data, _UNKNOWN if self._is_written(number) else data._version)
            alias = data
        if type(alias) is not torch.Tensor:
            return alias.detach()
        lent: torch.Tensor = torch.Tensor._make_subclass(torch.Tensor, alias)  # shares the version counter
        return lent

    @plainly
    def arrived(self, views: Sequence[torch.Tensor]) -> None:
        """The views were filled from the shards, which edits that wait for the other ranks have not reached."""
        for number, values in self.pending.items():
            if values is not None:
                views[number].copy_(values)
        if self.compares or self.writes_unseen:
            self.record(views)

    @plainly
    def leaving(self, views: Sequence[torch.Tensor], *, exact: bool) -> None:
        """Keep what was written into the gathered parameters, which are about to be released.

        ``exact``: the views held the shards' values, not what a codec leaves of them.
        """
        if not self.asks_for_a_look and untouched(self._parameters, views, self._dtypes, self._versions):
            return
        for number in self.found(views):
            values = self._new_values(number, views[number])
            if values is None:
                continue
            if not exact:
                self.refused[number] = (
                    "was written inside forward, where weights travel through a codec and other elements are rounded"
                )
            else:
                self.pending[number] = values

    @plainly
    def found(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Numbers of the parameters that were replaced or written since this was asked, or values recorded, last."""
        is_untouched = untouched(self._parameters, views, self._dtypes, self._versions)
        numbers = [] if is_untouched and not self._is_lent_written() else self._different(views)
        if self._sums is not None:
            before, self._sums = self._sums, _sums(views)
            written = [n for n, (old, new) in enumerate(zip(before, self._sums, strict=True)) if old != new]
            self.writes_unseen |= bool(set(written) - set(numbers))
            numbers = sorted({*numbers, *written})
        return numbers

    @plainly
    def note_replaced(self, placeholders: Sequence[torch.Tensor]) -> None:
        """Keep what released parameters were given instead of their placeholders."""
        for number, (parameter, tensor) in enumerate(zip(self._parameters, placeholders, strict=True)):
            if not parameter.is_set_to(tensor) or parameter.dtype is not self._dtype:
                given = _data(parameter)
                problem = self._misfit(given, tensor) or _nan_in(given)
                if problem:
                    self.refused[number] = f"{problem} while it was released"
                else:
                    self.pending[number] = given

    @plainly
    def note_in_views(self, number: int, view: torch.Tensor, *, was_cast: bool) -> None:
        """Keep what a parameter that stays gathered was given; ``was_cast``: forward has changed its dtype."""
        parameter = self._parameters[number]
        if parameter.is_set_to(view) and parameter.dtype is self._dtype:
            self.pending[number] = None
        elif was_cast and parameter.shape == view.shape:
            values = self._new_values(number, view)
            if values is not None:
                self.pending[number] = values
        elif problem := self._misfit(_data(parameter), view):
            self.refused[number] = problem
        else:
            self.pending[number] = _data(parameter)
        self._is_known(number)

    @plainly
    def record(self, views: Sequence[torch.Tensor]) -> None:
        """Take sums of the present values, for `found` to compare with. Reads every element."""
        self._sums = _sums(views)

    @plainly
    def forget(self) -> None:
        """Settle what was found: the present values count."""
        self.pending.clear()
        self.refused.clear()
        self._sums = None
        for number in range(len(self._parameters)):
            self._is_known(number)

    def updated(self, are_updated: Sequence[bool]) -> None:
        """The optimizer changed the parameters whose flag is set: torch refuses a backward through a forward from
        before, as it does after an update of its own."""
        increment_version(list(itertools.compress(self._parameters, are_updated)))
        self._versions = list(map(operator.add, self._versions, are_updated))

    def forget_sums(self) -> None:
        """The views have other values than `record` saw."""
        self._sums = None

    def gone(self) -> None:
        """The parameters are about to be released: nothing is known of what was lent or recorded of them."""
        self._sums = None
        self._lent.clear()

    def _is_known(self, number: int) -> None:
        """The present value of a parameter was seen."""
        self._versions[number] = _version(self._parameters[number], self._versions[number])
        if number in self._lent:
            alias, _ = self._lent[number]
            self._lent[number] = (alias, alias._version)

    def _is_lent_written(self) -> bool:
        return bool(self._lent) and any(map(self._is_written, self._lent))

    def _is_written(self, number: int) -> bool:
        """Return whether something was written through an alias that was lent."""
        alias, version = self._lent.get(number, (None, 0))
        return alias is not None and alias._version != version

    def _different(self, views: Sequence[torch.Tensor]) -> list[int]:
        return [
            number
            for number, (p, view) in enumerate(zip(self._parameters, views, strict=True))
            if not p.is_set_to(view)
            or p.dtype is not self._dtype
            or p._version != self._versions[number]
            or self._is_written(number)
        ]

    def _new_values(self, number: int, view: torch.Tensor) -> torch.Tensor | None:
        """A copy of what a gathered parameter was given; None when it was only cast."""
        self._is_known(number)
        given = _data(self._parameters[number])
        if given.shape != view.shape or given.is_meta:
            self.refused[number] = self._misfit(given, view)
            return None
        if given.dtype is not self._dtype and torch.equal(view.to(given.dtype), given):
            return None
        return given.to(self._dtype, copy=True)

    def _misfit(self, given: torch.Tensor, expected: torch.Tensor) -> str:
        """Why ``given`` cannot stand for ``expected``; empty when it can."""
        if given.shape != expected.shape:
            return f"was given a tensor of shape {tuple(given.shape)}, expected {tuple(expected.shape)},"
        if given.is_meta:
            return "was moved to the meta device"
        if given.dtype is not self._dtype:
            return f"was cast to {given.dtype}, but this engine keeps it in {self._dtype},"
        return ""


def _nan_in(values: torch.Tensor) -> str:
    if bool(torch.isnan(values).any()):
        return "was given values with NaN, which is what a released parameter reads as,"
    return ""


def _version(parameter: nn.Parameter, known: int) -> int:
    """The version counter; the one that is ``known`` where the user has put a tensor without one."""
    return known if parameter.is_inference() else parameter._version


def _sums(views: Sequence[torch.Tensor]) -> list[int]:
    """One number per contiguous tensor that other values, or the same ones elsewhere, change."""
    if views[0].device.type == "cpu":
        return [0 if is_fake(view) else xxhash.xxh3_64_intdigest(bytes_of(view)) for view in views]
    size = min(_CHUNK, max(view.numel() for view in views))
    weights = torch.arange(1, 2 * size, 2, device=views[0].device) * _ODD
    product = torch.empty_like(weights)
    found: list[torch.Tensor] = []
    for view in views:
        total = torch.zeros((), dtype=torch.int64, device=view.device)
        for words in _words(view.detach().reshape(-1)):
            for chunk in torch.split(words, size):
                here = product[: chunk.numel()]
                total = total * _ODD + torch.mul(chunk, weights[: chunk.numel()], out=here).sum()
        found.append(total)
    return [int(number) for number in torch.stack(found).tolist()]


def _words(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield all elements as integers of 64 bits: several in one where the address allows it."""
    size = flat.element_size()
    each = 8 // size
    head = min(-int(flat.storage_offset()) % each, flat.numel())
    end = head + (flat.numel() - head) // each * each
    if end > head:
        yield flat[head:end].view(torch.int64)
    for rest in (flat[:head], flat[end:]):
        if rest.numel():
            yield rest.view(_INTEGERS[size]).to(torch.int64)
