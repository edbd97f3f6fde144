"""The averaged gradients that the engine holds between backward and step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from .agreement import Agreement
from .calls import ModuleCalls
from .errors import PartitionError
from .gradients import UnitGradients
from .messages import StepNumber
from .reducer import Reducer
from .user_gradients import UserGradients


class HeldGradients:
    """Shows, discards and forgets the gradients that backward passes have left since the last step. To show gradients
    is to make them the parameters' ``.grad``.

    ``gradients``: of the trained units. ``step``: number for tags. The other arguments are parts of the same engine.

    Attributes:
        awaits_step: a backward pass has begun since the last step, and `discard` of all gradients has not followed.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        user_gradients: UserGradients,
        reducer: Reducer,
        agreement: Agreement,
        calls: ModuleCalls,
        step: StepNumber,
    ) -> None:
        self._gradients = gradients
        self._user_gradients = user_gradients
        self._reducer = reducer
        self._agreement = agreement
        self._calls = calls
        self._step = step
        self.awaits_step = False

    def show(self) -> None:
        """Make the full averaged gradients the parameters' ``.grad`` at stage 0, after gathering them; do nothing from
        stage 1 on. Collective at stage 0."""
        works = [work for g in self._gradients if (work := g.gather_full(self._step.value)) is not None]
        for work in works:
            work.wait()
        self._user_gradients.show()

    def hide(self) -> None:
        """Set the parameters' ``.grad`` to None again after `show`, so that autograd does not add to the averages; do
        nothing if none are shown."""
        self._user_gradients.hide()

    def discard(self, parameters: Iterable[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Forget the gradients of ``parameters`` (None: of all) since the last step, as ``zero_grad`` does.

        With None, also what a failed backward pass has left, which `refuse_torn` refuses. ``set_to_none``: False makes
        them zeros instead. Every rank calls it at the same point. Raises `PartitionError` inside a backward pass.
        """
        if self._calls.in_backward:
            raise PartitionError(
                "zero_grad was called inside a backward pass, while gradients are on their way; call it before or after"
            )
        self._user_gradients.discard(parameters, set_to_none=set_to_none)
        if parameters is None:
            self._reducer.torn = None
            self.awaits_step = False

    def forget(self) -> None:
        """Forget all gradients, what user code did to them, and that a backward pass failed; called at the end of a
        step. Sends nothing."""
        self._reducer.clear()
        self._user_gradients.forget()
        self.awaits_step = False

    def flush(self) -> None:
        """Reduce gradients that came too late for their unit's reduction, or were written by user code, on any rank,
        and `show` the averages if there were any. Collective: all ranks call it at the same point, outside passes."""
        self._user_gradients.take()
        late = self._agreement.agree("flush", "", self._reducer.unreduced())
        self.reduce_late({unit for units in late for unit in units})

    def reduce_late(self, units: Collection[int]) -> None:
        """Reduce the gradients of ``units`` (indices, the same on every rank) outside a pass, and `show` them.
        Collective; do nothing without units."""
        if units:
            self._reducer.reduce_scatter_now(units)
            self.show()

    def refuse_torn(self, call: str) -> None:
        """Raise `PartitionError` if the gradients hold a part of a backward pass that failed and were not discarded
        since. ``call``: begins the error's text, as "step"."""
        if self._reducer.torn is not None:
            raise PartitionError(
                f"{call}: an earlier backward pass or step failed ({self._reducer.torn}) and has left a part of its "
                "gradients; call engine.zero_grad() before the next backward or step"
            )
