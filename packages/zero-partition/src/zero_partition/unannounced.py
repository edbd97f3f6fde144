"""Uses of parameters that no hook announces, and which unit a parameter belongs to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import nn

from .agreement import Liveness
from .errors import ReleasedParameterError
from .gatherer import Gatherer, OrderedGathers
from .reducer import Reducer
from .unit import Unit, UnitState


class UnannouncedUse:
    """Gathers units for code that reads a parameter where no hook has announced it.

    Attributes:
        trains: gradients are enabled in the running forward, or were in the last one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: OrderedGathers,
        gatherer: Gatherer,
        reducer: Reducer,
        liveness: Liveness,
    ) -> None:
        self._gathers = gathers
        self._gatherer = gatherer
        self._reducer = reducer
        self._liveness = liveness
        self._unit_of = {id(p): u for u in units if u.releasable for p in u.parameters}
        self.trains = False
        self._thread: int | None = None

    def pass_begins(self, *, trains: bool) -> None:
        """A forward pass begins on this thread; whether gradients are enabled."""
        self.trains = trains
        self._thread = threading.get_ident()

    def gather(self, unit: Unit) -> None:
        """Return when the parameters of a releasable unit are full; in a pass or outside.

        Raises `CommError` after a failure, and `ReleasedParameterError` on a thread that neither began the last forward
        pass nor runs a backward pass: what it gathers would not be what the other ranks gather at that moment.
        """
        self._liveness.check()
        if self._thread not in (None, threading.get_ident()) and torch._C._current_graph_task_id() == -1:
            raise ReleasedParameterError(
                f"parameter '{unit.names[0]}' or another one of its unit was read on thread "
                f"'{threading.current_thread().name}', but it is released and training runs on another thread, whose "
                "order of gathers the ranks have agreed on. Copy what other threads need on the training thread, "
                "inside `with engine.gathered([...])`."
            )
        self._gatherer.gather(unit)
        if self.trains:
            self._reducer.mark_ran(unit.index)

    def unit_of(self, parameter: nn.Parameter) -> Unit | None:
        """The releasable unit of ``parameter``, if it has one."""
        return self._unit_of.get(id(parameter))

    def parameter_read(self, parameter: nn.Parameter) -> None:
        """Code asked a module for a parameter: gather it when a pass of this engine runs on this rank. After a failure
        it gets the placeholder, with which nothing can be computed."""
        unit = self.unit_of(parameter)
        runs = self._gathers.active and not self._liveness.failed
        if unit is not None and runs and not self._gathers.is_used(unit):
            self.gather(unit)

    def refuse_pickle(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise when one of the parameters is released: what would be written down is NaN."""
        for parameter in parameters:
            unit = self.unit_of(parameter)
            if unit is not None and unit.state is not UnitState.GATHERED:
                name = next(n for n, p in zip(unit.names, unit.parameters, strict=True) if p is parameter)
                raise ReleasedParameterError(
                    f"parameter '{name}' is released, and a pickle of its module would hold NaN. Write it inside "
                    "`engine.gathered(list(model.parameters()))`, or use engine.consolidated_state_dict()."
                )
