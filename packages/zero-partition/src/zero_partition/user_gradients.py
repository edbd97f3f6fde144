"""Show averaged gradients in the parameters' ``.grad``, and take gradients that user code writes there."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from .errors import STEP_DROPPED, PartitionError
from .gradients import UnitGradients
from .host_facts import any_gradient, gradients_are
from .messages import WrittenGradients
from .training_loop import TrainingLoop
from .unit_edits import without_torch_function


class UserGradients:
    """Shows averaged gradients in ``.grad`` (stage 0) and takes gradients that user code writes there (every stage).

    [Note: written gradients] A gradient that user code writes to ``p.grad`` on a rank is that rank's gradient of ``p``:
    it replaces all that backward has given since the last step, later passes add to it, and it is averaged over the
    ranks like autograd's own. ``None`` means no gradient. Both are found when a pass or a step begins, by comparing
    ``p.grad`` with what the engine left there. A parameter with a gradient from backward has to be written on every
    rank or on none, as one rank's part of an average cannot be replaced.

    Averages can also be edited, that is, changed in place. A parameter that forward has cast to another dtype shows a
    cast copy of its average. ``gradients``: of the trained units. ``loop``: says whether gradients may be written now.
    Units are given by index, and a parameter's number is its position in its unit.

    Attributes:
        discards: a digest of the averaged gradients discarded since the last step; the same on every rank.
    """

    def __init__(self, gradients: Sequence[UnitGradients], loop: TrainingLoop) -> None:
        self._loop = loop
        self.discards = 0
        self._gradients = {g.unit.index: g for g in gradients}
        self._parameters = [p for g in gradients for p in g.unit.parameters]
        self._shown: dict[int, list[torch.Tensor | None]] = {}
        self._left: list[torch.Tensor | None] = []
        self._versions: dict[int, int] = {}
        self._casts: dict[int, dict[int, int]] = {}
        self._written: dict[int, set[int]] = {}
        self._edited: set[int] = set()

    # -- what the user sees ------------------------------------------------------------------------------------------

    @without_torch_function
    def show(self) -> None:
        """Set ``.grad`` of the parameters to their full averaged gradients, for units that keep these (stage 0).

        A parameter gets None if this rank had no gradient of it and the average is zero, for which the host waits for
        the device; one whose shape has changed keeps what it has. Does not communicate.
        """
        self._casts.clear()
        for index, gradients in self._gradients.items():
            shown: list[torch.Tensor | None] = []
            for number, (parameter, view, touched) in enumerate(gradients.full_gradients()):
                if parameter.shape != view.shape:  # the step refuses it
                    shown.append(parameter.grad)
                    continue
                seen = view if view.dtype is parameter.dtype else view.to(parameter.dtype)  # cast inside forward
                parameter.grad = seen if touched or bool(view.any()) else None
                shown.append(parameter.grad)
                if seen is not view:
                    self._casts.setdefault(index, {})[number] = seen._version
            if shown:
                self._shown[index] = shown
                self._note_version(index)
        self._note_left()

    def refresh(self) -> None:
        """Show the averaged gradients again after the engine itself has changed them; do nothing if none are shown."""
        if self._shown:
            self.show()

    @without_torch_function
    def hide(self) -> None:
        """Set ``.grad`` to None for every parameter of the units whose averages are shown, as autograd would add to the
        averages in place. Do nothing if none are shown.

        The averages stay in `UnitGradients`. Call `take` first, or gradients that user code wrote to ``.grad`` are
        lost.
        """
        for index in self._shown:
            for parameter in self._gradients[index].unit.parameters:
                parameter.grad = None
        self._forget_shown()

    # -- what the user writes ----------------------------------------------------------------------------------------

    @without_torch_function
    def take(self, *, stepping: bool = False) -> None:
        """Make gradients that user code has written to ``.grad`` this rank's gradients. Does not communicate.

        ``stepping``: no backward pass follows before the step, so edited averages can stay if they are the same on
        every rank; otherwise they are queued for another reduction. Raises `PartitionError` if gradients may not be
        written now, and the errors of `UnitGradients.add`.
        """
        if self._is_as_left():
            if not stepping and self._edited:
                self._resend(self._edited)
            return
        for index, gradients in self._gradients.items():
            shown = self._shown.get(index, [None] * len(gradients.unit.parameters))
            new = {
                number: parameter.grad
                for number, (parameter, before) in enumerate(zip(gradients.unit.parameters, shown, strict=True))
                if parameter.grad is not before or self._was_cast_edited(index, number, before)
            }
            if index in self._shown and self._was_edited(index):
                self._check_allowed(gradients.unit.names[0])
                gradients.adopt_shown()
                self._edited.add(index)
            for number, gradient in new.items():
                self._check_allowed(gradients.unit.names[number])
                self._replace(gradients, number, gradient)
            self._note_version(index)
        if not stepping:
            self._resend(self._edited)
        self._note_left()

    def report(self) -> WrittenGradients:
        """Return which gradients user code on this rank has written or edited since the last step, as far as `take` has
        found them."""
        return WrittenGradients(
            {index: sorted(numbers) for index, numbers in self._written.items()},
            {index: self._gradients[index].digest() for index in sorted(self._edited)},
        )

    @without_torch_function
    def settle(self, reports: Sequence[WrittenGradients]) -> bool:
        """Queue edited averages that differ between ranks for another reduction; return whether there are any.

        ``reports``: every rank's `report`, in rank order. Raises `PartitionError` on every rank if only some ranks have
        edited a unit's averages.
        """
        edited = {index for report in reports for index in report.edited}
        for index in sorted(edited):
            without = [rank for rank, report in enumerate(reports) if index not in report.edited]
            if without:
                unit = self._gradients[index].unit
                editor = next(rank for rank in range(len(reports)) if rank not in without)
                raise PartitionError(
                    f"gradients of the unit of parameter '{unit.names[0]}' were changed in place on rank {editor} and "
                    f"not on rank {without[0]}. Change p.grad on every rank or on none. {STEP_DROPPED}"
                )
        apart = {index for index in edited if len({report.edited.get(index) for report in reports}) > 1}
        self._resend(apart)
        return bool(apart)

    def check(self, reports: Sequence[WrittenGradients], untouched: Sequence[Mapping[int, Sequence[int]]]) -> None:
        """Raise `PartitionError` on every rank if some ranks have written a gradient that other ranks have from
        backward.

        ``reports``: every rank's `report`, in rank order. ``untouched``: by rank and unit index, the numbers of the
        parameters that have no gradient there.
        """
        for index in sorted({index for report in reports for index in report.written}):
            wrote = [set(report.written.get(index, ())) for report in reports]
            for number in sorted(set.union(*wrote)):
                writers = [rank for rank, numbers in enumerate(wrote) if number in numbers]
                others = [
                    rank
                    for rank in range(len(reports))
                    if rank not in writers and number not in untouched[rank].get(index, ())
                ]
                if others:
                    raise PartitionError(
                        f"the gradient of parameter '{self._gradients[index].unit.names[number]}' was written on "
                        f"rank {writers[0]}, but rank {others[0]} has one from backward: the average of both is no "
                        f"gradient of either. Write p.grad on every rank or on none. {STEP_DROPPED}"
                    )

    @without_torch_function
    def discard(self, parameters: Iterable[nn.Parameter] | None, *, set_to_none: bool) -> None:
        """Discard the gradients of ``parameters`` (None: of all), or with ``set_to_none`` false make them zeros.

        Parameters that are not trained are ignored. Unless all become None, gradients that user code wrote are taken
        first. `discards` changes if the gradients of any unit concerned are averages.
        """
        numbers = self._numbers_by_unit(parameters)
        if not numbers:
            return
        reduced = any(self._gradients[index].is_reduced for index in numbers)
        everything = sum(map(len, numbers.values())) == len(self._parameters)
        if everything and set_to_none:
            self._clear()
        else:
            self.take(stepping=True)
            for index, chosen in numbers.items():
                self._gradients[index].discard(chosen, keep_zeros=not set_to_none)
                if set_to_none:
                    self._written.get(index, set()).difference_update(chosen)
            self.refresh()
        if reduced:
            what = "everything" if everything else str(sorted(numbers.items()))
            self.discards = zlib.crc32(f"{what} {set_to_none}".encode(), self.discards) or 1

    def forget(self) -> None:
        """Forget, after a step, which gradients user code has written or discarded; ``.grad`` stays as it is."""
        self._written.clear()
        self._edited.clear()
        self.discards = 0

    def reset(self) -> None:
        """Drop all gradients, forget what user code has written, edited or discarded, and set every ``.grad``
        to None."""
        self._clear()
        self.forget()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Drop all gradients, forget which of them user code has written, and set every ``.grad`` to None."""
        with torch._C.DisableTorchFunctionSubclass():
            if any_gradient(self._parameters):
                for parameter in self._parameters:
                    parameter.grad = None
        for gradients in self._gradients.values():
            gradients.clear()
        self._forget_shown()
        self._written.clear()

    def _forget_shown(self) -> None:
        """Forget which averages are shown and drop this object's references to them, casts (`show`) included."""
        self._shown.clear()
        self._left.clear()
        self._casts.clear()
        self._edited.clear()

    def _is_as_left(self) -> bool:
        """Return whether every ``.grad`` is the tensor, or None, that the engine left there, and was not edited."""
        if not self._shown:
            return not any_gradient(self._parameters)
        if self._casts or not gradients_are(self._parameters, self._left):
            return False
        return not any(map(self._was_edited, self._shown))

    def _note_left(self) -> None:
        """Store for `_is_as_left` what the engine has left in each ``.grad``; do nothing if no averages are shown."""
        if self._shown:
            nothing = itertools.repeat(None)
            units = ((g.unit.parameters, self._shown.get(index, nothing)) for index, g in self._gradients.items())
            self._left = [shown for parameters, seen in units for _, shown in zip(parameters, seen, strict=False)]

    def _version(self, index: int) -> int | None:
        """Return the version counter that the shown averages of unit ``index`` share, as views of one tensor; None if
        none are shown."""
        casts = self._casts.get(index, {})
        shown = enumerate(self._shown.get(index, ()))
        return next((t._version for number, t in shown if t is not None and number not in casts), None)

    def _note_version(self, index: int) -> None:
        """Store the present version counter of the shown averages of unit ``index``, if there are any, for
        `_was_edited`."""
        version = self._version(index)
        if version is not None:
            self._versions[index] = version

    def _was_edited(self, index: int) -> bool:
        """Return whether the shown averages of unit ``index`` were written in place since `_note_version`; False if
        none are shown."""
        version = self._version(index)
        return version is not None and version != self._versions[index]

    def _was_cast_edited(self, index: int, number: int, shown: torch.Tensor | None) -> bool:
        """Return whether ``shown`` is a cast copy of an average and was written in place, which does not show in the
        unit's version counter.

        ``index``: of the unit. ``number``: of the parameter. ``shown``: what the engine left in the parameter's
        ``.grad``.
        """
        known = self._casts.get(index, {}).get(number)
        return known is not None and shown is not None and shown._version != known

    def _check_allowed(self, name: str) -> None:
        """Raise `PartitionError`, naming parameter ``name``, if user code may not write gradients now."""
        refusal = self._loop.refuse_written_gradients()
        if refusal is not None:
            raise PartitionError(f"the gradient of parameter '{name}' was written: {refusal}")

    def _replace(self, gradients: UnitGradients, number: int, gradient: torch.Tensor | None) -> None:
        """Make ``gradient`` (None: no gradient) this rank's gradient of parameter ``number`` in place of all from
        backward, queue it for reduction, and record that user code has written it.

        ``gradients``: of the parameter's unit. Sets the parameter's ``.grad`` to None.
        """
        unit = gradients.unit
        gradients.discard([number])
        if gradient is not None:
            dense = gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense()
            gradients.add(number, dense, more_follow=True)
        unit.parameters[number].grad = None
        if unit.index in self._shown:
            self._shown[unit.index][number] = None
        self._written.setdefault(unit.index, set()).add(number)

    def _resend(self, units: Iterable[int]) -> None:
        """Queue the shown averages of ``units`` (indices), as user code has edited them, for another reduction, as this
        rank's own gradients.

        The parameters count as written by user code, and their ``.grad`` becomes None. Does nothing for units that show
        none, and does not communicate.
        """
        for index in sorted(units):
            gradients = self._gradients[index]
            for number, shown in enumerate(self._shown.get(index, ())):
                if shown is not None:
                    self._replace(gradients, number, gradients.full_gradient(number))
        self._edited.difference_update(set(units))
        self._note_left()

    def _numbers_by_unit(self, parameters: Iterable[nn.Parameter] | None) -> Mapping[int, Sequence[int]]:
        """Return, by unit index, the numbers of the unit's parameters that are among ``parameters`` (None: all); units
        without any are left out."""
        if parameters is None:
            return {index: range(len(g.unit.parameters)) for index, g in self._gradients.items()}
        chosen = {id(p) for p in parameters}
        found = {
            index: [n for n, p in enumerate(g.unit.parameters) if id(p) in chosen]
            for index, g in self._gradients.items()
        }
        return {index: numbers for index, numbers in found.items() if numbers}
