"""Gather the unit of a released parameter whose values code uses, or raise an error that names the parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .errors import ReleasedParameterError
from .live import UnitState
from .ordered_gathers import OrderedGathers
from .released import mark_released
from .unannounced import UnannouncedUse
from .unit import Unit


class ReleasedUse:
    """Gathers, or refuses, the released parameters of one engine when code uses their values.

    [Note: when a use gathers] Inside a forward or backward pass the unit is gathered like any other. Between a forward
    that trains and the step, with gradients enabled, a use is part of the loss: this rank requests the unit, and the
    others serve it at their next engine call (see agreement.py), whether or not they use it too. The unit's memory then
    belongs to the graph of the loss. Anywhere else another rank may never make an engine call, so the use is refused;
    only a single rank gathers at once. Reading facts about a parameter, such as its dtype, is not a use.

    ``alone``: there is a single rank. The other arguments are parts of the same engine.
    """

    def __init__(self, unannounced: UnannouncedUse, gathers: OrderedGathers, *, alone: bool) -> None:
        self._unannounced = unannounced
        self._gathers = gathers
        self._alone = alone
        self._in_training = False

    def forward_ended(self) -> None:
        """Allow uses outside passes until `step_begins`, as a forward that trains has ended and they may be part of its
        loss."""
        self._in_training = True

    def step_begins(self) -> None:
        """Refuse uses outside passes until the next `forward_ended`. A single rank may always use parameters."""
        self._in_training = False

    def used(self, parameter: nn.Parameter, call: str, *, writes: bool) -> None:
        """Gather the unit of ``parameter``, as the torch function named ``call`` is about to use its values;
        ``writes``: the function writes them.

        Does nothing for a parameter that is never released or that the user has gathered. Raises
        `ReleasedParameterError`, naming it, for writes outside passes and where it cannot be gathered (see [Note: when
        a use gathers]).
        """
        unit = self._unannounced.unit_of(parameter)
        if unit is None:
            return
        if self._gathers.active:
            self._unannounced.gather(unit)
            return
        if unit.pinned:
            return
        name = unit.names[next(i for i, p in enumerate(unit.parameters) if p is parameter)]
        if writes:
            raise ReleasedParameterError(
                f"{call}() would write parameter '{name}' while it is released, and the value would be lost. Change it "
                "on every rank inside `with gathered([parameter], modifier_rank=0)`."
            )
        if not self._alone and not (self._in_training and torch.is_grad_enabled()):
            raise ReleasedParameterError(
                f"{call}() was called with parameter '{name}', which is released: its values are spread over the "
                "ranks. They come by themselves inside forward and backward, and with gradients enabled between a "
                "forward and its step. Elsewhere open `with gathered([parameter])` on every rank."
            )
        if unit.state is not UnitState.GATHERED:
            self._unannounced.gather(unit)
            unit.lent = True
            self._gathers.note_outside(unit)
            _compute_with_views(unit)

    def gathered(self, units: Iterable[Unit]) -> None:
        """Prepare the parameters of ``units``, which the user has just gathered, for use in a loss: autograd will save
        views of them instead of the parameters. Do nothing unless `forward_ended` was called since the last step."""
        if self._in_training:
            for unit in units:
                _compute_with_views(unit)


def _compute_with_views(unit: Unit) -> None:
    """Have torch functions compute with views of the parameters of ``unit``, which is gathered, instead of the
    parameters themselves, by giving these their released classes.

    Autograd saves a leaf as the parameter, which is a placeholder again in backward, but a view as its memory.
    """
    mark_released(unit.parameters)
