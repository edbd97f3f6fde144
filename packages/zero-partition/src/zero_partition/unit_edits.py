"""Find edits of one unit's parameters by user code: replaced storage, in-place writes, casts.

A write leaves no trace if neither address, dtype nor version counters show it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version

from .checksums import Checksums, checksums, differing
from .host_facts import are_set_to, untouched

_UNKNOWN = -1  # no version counter says this
_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__  # type: ignore[attr-defined]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def without_torch_function(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate ``call`` to run with ``__torch_function__`` of tensor subclasses disabled: released parameters are plain
    tensors in it, so that looking at them does not gather them."""

    @functools.wraps(call)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Return the result of ``call``, run with ``__torch_function__`` of tensor subclasses disabled."""
        with torch._C.DisableTorchFunctionSubclass():
            return call(*args, **kwargs)

    return wrapped


class UnitEdits:
    """Finds parameters of a unit that user code has replaced, written or cast, and keeps their new values.

    Most changes show in a parameter's address (`Tensor.is_set_to`), dtype or version counter, so nothing is read on the
    device. A write through ``p.data`` does not: the alias that `lend` keeps has a version counter for it. Writes to
    memory that torch does not watch (NumPy, DLPack) show only in checksums of the values, which `record_checksums`
    takes. To look at a parameter is to compare it with its state when it was last looked at.

    [Note: edits wait for all ranks] A new value is `pending` until every rank has reported the same one. Only then does
    it reach shards and masters. A refused one never does.

    ``names``, ``parameters``: the unit's, in order; a parameter's number is its position. ``dtype``: the unit's.

    Attributes:
        pending: by parameter number, the full new values; None if they are in the parameter's own view already.
        refused: by parameter number, why the new values cannot be used, as the rest of a sentence about it.
        compares: take checksums at the next gather, so that writes without a trace are found.
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
        self._checksums: Checksums | None = None
        self._compared: list[int] | None = None
        self._lent: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def versions(self) -> Sequence[int]:
        """The version counter of each parameter when it was last looked at."""
        return self._versions

    @property
    def needs_full_check(self) -> bool:
        """True if checksums or aliases that `lend` has returned have to be compared too, besides addresses, dtypes and
        version counters."""
        return self._checksums is not None or self._is_lent_written()

    @property
    def checksums(self) -> Checksums | None:
        """The checksums that `find_changed` compares with; None if there are none."""
        return self._checksums

    @property
    def has_checksums(self) -> bool:
        """True if `find_changed` compares checksums of the values."""
        return self._checksums is not None

    @without_torch_function
    def lend(self, number: int, data: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``data`` for user code that reads ``p.data`` of parameter ``number``; `find_changed` finds
        writes through it, until `forget_lent`.

        ``data``: what ``p.data`` is; an inference tensor, which has no version counter, is returned itself.
        """
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

    @without_torch_function
    def apply_pending(self, views: Sequence[torch.Tensor]) -> None:
        """Copy pending values into ``views``, the parameters' views of the flat buffer, which a gather has just filled
        from shards without them.

        Then take checksums if `compares` or `writes_unseen`.
        """
        for number, values in self.pending.items():
            if values is not None:
                views[number].copy_(values)
        if self.compares or self.writes_unseen:
            self.record_checksums(views)

    @without_torch_function
    def collect_written(self, views: Sequence[torch.Tensor], *, exact: bool) -> None:
        """Keep the new values of gathered parameters that user code has written, as `pending` or `refused`.

        ``views``: the parameters' views of the flat buffer. ``exact``: they were gathered without a codec; else such
        writes are refused. A mere cast to another dtype is no new value. Pending values are copies.
        """
        if not self.needs_full_check and untouched(self._parameters, views, self._dtypes, self._versions):
            return
        for number in self.find_changed(views):
            values = self._new_values(number, views[number])
            if values is None:
                continue
            if not exact:
                self.refused[number] = (
                    "was written inside forward, where weights travel through a codec and other elements are rounded"
                )
            else:
                self.pending[number] = values

    @without_torch_function
    def find_changed(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the parameters that user code has replaced or written since they were last looked at.

        ``views``: the parameters' views of the flat buffer. If there are checksums, they are compared with the present
        values and renewed; other changes are found again by the next call.
        """
        is_untouched = untouched(self._parameters, views, self._dtypes, self._versions)
        numbers = [] if is_untouched and not self._is_lent_written() else self._find_different(views)
        if self._checksums is not None:
            compare_checksums([(self, views)])
            written, self._compared = self._compared or [], None
            self.writes_unseen |= bool(set(written) - set(numbers))
            numbers = sorted({*numbers, *written})
        return numbers

    @without_torch_function
    def note_replaced(self, placeholders: Sequence[torch.Tensor]) -> None:
        """Keep the tensors that released parameters have in place of their ``placeholders`` (one per parameter), as
        `pending` or, where they do not fit or hold NaN, as `refused`."""
        for number, (parameter, tensor) in enumerate(zip(self._parameters, placeholders, strict=True)):
            if not parameter.is_set_to(tensor) or parameter.dtype is not self._dtype:
                given = _data(parameter)
                problem = self._misfit_reason(given, tensor) or _nan_reason(given)
                if problem:
                    self.refused[number] = f"{problem} while it was released"
                else:
                    self.pending[number] = given

    @without_torch_function
    def note_in_views(self, number: int, view: torch.Tensor, *, was_cast: bool) -> None:
        """Keep the new value of changed parameter ``number``, which stays gathered, as `pending` or `refused`; it
        counts as looked at then.

        ``view``: the parameter's view of the flat buffer. ``was_cast``: forward has changed the parameter's dtype,
        which alone is no new value.
        """
        parameter = self._parameters[number]
        if parameter.is_set_to(view) and parameter.dtype is self._dtype:
            self.pending[number] = None
        elif was_cast and parameter.shape == view.shape:
            values = self._new_values(number, view)
            if values is not None:
                self.pending[number] = values
        elif problem := self._misfit_reason(_data(parameter), view):
            self.refused[number] = problem
        else:
            self.pending[number] = _data(parameter)
        self._note_seen(number)

    @without_torch_function
    def record_checksums(self, views: Sequence[torch.Tensor]) -> None:
        """Take checksums of the present values of ``views``, for `find_changed` to compare with. Reads every
        element."""
        self._checksums, self._compared = checksums(views), None

    @without_torch_function
    def renew_checksum(self, before: Checksums, number: int, views: Sequence[torch.Tensor]) -> None:
        """Make ``before`` the checksums that `find_changed` compares with, except for parameter ``number``, whose
        checksum is taken again from ``views``: the engine has written it, and user code may have written the others
        since."""
        now, self._compared = checksums(views), None
        kept: Any = before.clone() if isinstance(before, torch.Tensor) else list(before)
        kept[number] = now[number]
        self._checksums = kept

    @without_torch_function
    def mark_clean(self) -> None:
        """Drop pending and refused edits and checksums, and count the parameters as unchanged from now on. Aliases that
        `lend` has returned stay valid."""
        self.pending.clear()
        self.refused.clear()
        self._checksums = self._compared = None
        for number in range(len(self._parameters)):
            self._note_seen(number)

    def bump_versions(self, are_updated: Sequence[bool]) -> None:
        """Raise the version counters of the parameters that the optimizer has updated, by 1. ``are_updated``: a flag
        for each parameter.

        torch then refuses a backward through an earlier forward, as it does after an update in place.
        """
        increment_version(list(itertools.compress(self._parameters, are_updated)))
        self._versions = list(map(operator.add, self._versions, are_updated))

    def forget_checksums(self) -> None:
        """Drop the checksums: until new ones are taken, writes without a trace are not found."""
        self._checksums = self._compared = None

    @without_torch_function
    def count_lent(self, views: Sequence[torch.Tensor]) -> int:
        """Return how many of the aliases that `lend` keeps lie in ``views``, the parameters' views of the flat
        buffer."""
        return sum(alias.is_set_to(views[number]) for number, (alias, _) in self._lent.items())

    @without_torch_function
    def are_in_place(self, views: Sequence[torch.Tensor]) -> bool:
        """Return whether every parameter has the memory of its view of the flat buffer, one of ``views``."""
        return are_set_to(self._parameters, views)

    def forget_lent(self) -> None:
        """Drop checksums and the aliases that `lend` has returned, as the parameters are being released."""
        self._checksums = self._compared = None
        self._lent.clear()

    def _note_seen(self, number: int) -> None:
        """Count parameter ``number`` as looked at: store the present version counters of it and of its lent alias, if
        any."""
        self._versions[number] = _version(self._parameters[number], self._versions[number])
        if number in self._lent:
            alias, _ = self._lent[number]
            self._lent[number] = (alias, alias._version)

    def _is_lent_written(self) -> bool:
        """Return whether user code has written through any alias that `lend` has returned, since the parameter was
        looked at."""
        return bool(self._lent) and any(map(self._is_written, self._lent))

    def _is_written(self, number: int) -> bool:
        """Return whether user code has written through the alias that `lend` has returned for parameter ``number``;
        False if there is none."""
        alias, version = self._lent.get(number, (None, 0))
        return alias is not None and alias._version != version

    def _find_different(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Return the numbers of the parameters that differ from their ``views`` in address or dtype, or were written,
        also through an alias that `lend` has returned."""
        return [
            number
            for number, (p, view) in enumerate(zip(self._parameters, views, strict=True))
            if not p.is_set_to(view)
            or p.dtype is not self._dtype
            or p._version != self._versions[number]
            or self._is_written(number)
        ]

    def _new_values(self, number: int, view: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the value of changed parameter ``number`` in the unit's dtype, and count it as looked at.
        Return None if it was only cast, or if it does not fit ``view`` and so was put into `refused`."""
        self._note_seen(number)
        given = _data(self._parameters[number])
        if given.shape != view.shape or given.is_meta:
            self.refused[number] = self._misfit_reason(given, view)
            return None
        if given.dtype is not self._dtype and torch.equal(view.to(given.dtype), given):
            return None
        return given.to(self._dtype, copy=True)

    def _misfit_reason(self, given: torch.Tensor, expected: torch.Tensor) -> str:
        """Return why ``given`` cannot replace ``expected`` (another shape or dtype, or the meta device), as the rest of
        a sentence about the parameter; "" if it can."""
        if given.shape != expected.shape:
            return f"was given a tensor of shape {tuple(given.shape)}, expected {tuple(expected.shape)},"
        if given.is_meta:
            return "was moved to the meta device"
        if given.dtype is not self._dtype:
            return f"was cast to {given.dtype}, but this engine keeps it in {self._dtype},"
        return ""


def compare_checksums(units: Sequence[tuple[UnitEdits, Sequence[torch.Tensor]]]) -> None:
    """Compare the checksums of those units that have some with the present values of their views, and renew them.

    ``units``: each unit's edits and views. The next `UnitEdits.find_changed` of each unit uses the result. The host
    waits for an accelerator once, not once per unit.
    """
    due = [(edits, views) for edits, views in units if edits._checksums is not None and edits._compared is None]
    pairs = [(before, checksums(views)) for edits, views in due if (before := edits._checksums) is not None]
    for (edits, _), (_, now), written in zip(due, pairs, differing(pairs), strict=True):
        edits._checksums, edits._compared = now, written


def _nan_reason(values: torch.Tensor) -> str:
    """Return why ``values`` are refused if one is NaN, as the rest of a sentence about their parameter; "" if
    none is."""
    if bool(torch.isnan(values).any()):
        return "was given values with NaN, which is what a released parameter reads as,"
    return ""


def _version(parameter: nn.Parameter, known: int) -> int:
    """Return the version counter of ``parameter``; ``known`` for an inference tensor, which has none."""
    return known if parameter.is_inference() else parameter._version
