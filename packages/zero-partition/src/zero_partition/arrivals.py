"""Take gradients from autograd's ``.grad`` into the units' buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .agreement import Liveness
from .errors import PartitionError
from .gatherer import Gatherer
from .gradient_hook import GradientHook
from .gradients import UnitGradients
from .reducer import Reducer
from .unit import Unit
from .unit_watch import WatchedUnits


class GradientArrivals:
    """Moves gradients that autograd has finished into the units' buffers, after the user's hooks have run on them.

    ``units``: all units, by index; ``gradients``: those of trained units, by index. ``gatherer``, ``reducer``: release
    and reduce a unit when its last gradient has arrived. ``liveness``: is told of a failure that ends the engine.
    ``watched_units``: its ``watch``, if set, is called when a unit's gradients are done.

    Attributes:
        reduces_each: the caller of each backward pass reduces its gradients itself, without a reducing pass.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Mapping[int, UnitGradients],
        gatherer: Gatherer,
        reducer: Reducer,
        liveness: Liveness,
        watched_units: WatchedUnits,
    ) -> None:
        self._units = units
        self._gradients = gradients
        self._gatherer = gatherer
        self._reducer = reducer
        self._liveness = liveness
        self._watched_units = watched_units
        self._left: list[tuple[int, int, GradientHook]] = []
        self.reduces_each = False

    def ready(self, unit: int, number: int, hook: GradientHook) -> None:
        """Move the gradient of parameter ``number`` (its index) of the unit with index ``unit``, which autograd has
        finished, into the unit's buffer.

        If hooks of the user's still have to run on the gradient, it stays in ``.grad`` and is moved when the next
        gradient is ready, or by `take_left`. ``hook``: the parameter's. Raises `PartitionError` if a hook has changed
        the gradient after an earlier pass of the step, and for ``create_graph=True``.
        """
        if self._left:
            self.take_left()
        if hook.user_hooks_follow:
            self._left.append((unit, number, hook))
        else:
            self._take(unit, number, hook)

    def take_left(self) -> None:
        """Move the gradients that were left in ``.grad`` for the user's hooks, which have run by now, into the units'
        buffers; do nothing if there are none."""
        left, self._left = self._left, []
        for unit, number, hook in left:
            self._take(unit, number, hook)

    def forget_left(self) -> None:
        """Set the gradients that were left in ``.grad`` for the user's hooks to None, as their backward pass has
        failed."""
        for unit, number, _ in self._left:
            self._units[unit].parameters[number].grad = None
        self._left.clear()

    def _take(self, index: int, number: int, hook: GradientHook) -> None:
        """Move the ``.grad`` of parameter ``number`` of unit ``index`` into the unit's buffer, and make it None. Does
        nothing more if it was None.

        When the unit has all gradients that it is expected to get in a pass that reduces, it is released, and may be
        reduced. ``hook``: the parameter's. Raises `PartitionError` if a hook of the user's changed the gradient after
        an earlier pass of the step, and, ending the engine, for ``create_graph=True``.
        """
        unit, gradients = self._units[index], self._gradients[index]
        parameter = unit.parameters[number]
        gradient, parameter.grad = parameter.grad, None
        if hook.was_changed(gradient) and gradients.touched[number]:
            raise PartitionError(
                f"a post-accumulate-grad hook changed the gradient of parameter '{unit.names[number]}' after the first "
                "backward pass since the last step. In torch it sees the sum of the passes, here each pass's alone. "
                "Use parameter.register_hook, which sees each pass's alone in torch too, or one backward pass a step. "
                "Weights were not changed; call engine.zero_grad() before you continue."
            )
        if gradient is None:
            return
        if gradient.requires_grad:
            refusal = PartitionError(
                f"backward(create_graph=True) reached parameter '{unit.names[number]}', but the engine takes gradients "
                "as numbers and leaves no .grad to continue from. Use torch.autograd.grad(..., create_graph=True), and "
                "give the loss that contains its result to engine.backward."
            )
            self._liveness.end(refusal)
            raise refusal
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        reduces = self._reducer.active
        gradients.add(number, gradient, more_follow=not (reduces or self.reduces_each))
        if reduces and self._reducer.arrived(index, number):
            if self._watched_units.watch is not None:
                self._watched_units.watch.backward_done(unit)
            self._gatherer.release(unit)
