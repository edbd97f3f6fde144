"""Gather units for uses of parameters that no module hook announces."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import nn

from .agreement import Liveness
from .errors import ReleasedParameterError
from .gatherer import Gatherer
from .live import UnitState
from .micro_batch_threads import MicroBatchThread
from .ordered_gathers import OrderedGathers
from .reducer import Reducer
from .unit import Unit


class UnannouncedUse:
    """Gathers the unit of a parameter that code reads although no module hook has gathered it.

    ``units``: all units. ``gathers``, ``gatherer``: gather them in the agreed order. ``reducer``: is told that a unit
    was used, as gradients may follow. ``liveness``: tells whether the engine works.

    Attributes:
        trains: gradients are enabled in the running forward pass, or were in the last one.
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
        """Record that this thread begins a forward pass: outside backward only this thread may gather from now on.
        ``trains``: gradients are enabled in the pass."""
        self.trains = trains
        self._thread = threading.get_ident()

    def gather(self, unit: Unit) -> None:
        """Gather ``unit``, which is releasable, and wait for it, in a pass or outside. Outside, every rank has to take
        part.

        Raises `CommError` after a failure, and `ReleasedParameterError` on a thread that neither began the last forward
        pass nor runs a backward pass, and on one that runs a single micro-batch of `train_batch`: its gathers would not
        be in the order that the ranks have agreed on.
        """
        self._liveness.check()
        if isinstance(threading.current_thread(), MicroBatchThread):
            raise ReleasedParameterError(
                f"train_batch: parameter '{unit.names[0]}' or another one of its unit is used between the modules that "
                "micro-batches visit, where it is released. Use it in the forward of the module that owns it, or use "
                "the ordinary loop of engine(batch), engine.backward and engine.step."
            )
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
        """Return the unit of ``parameter`` if that is releasable; None if it is not, or if the parameter is not of the
        model."""
        return self._unit_of.get(id(parameter))

    def parameter_read(self, parameter: nn.Parameter) -> None:
        """Gather ``parameter``, which code has just read from a module, if a pass runs that has not used its unit yet.

        Otherwise the code gets the placeholder: also after a failure, and on a micro-batch's thread between its visits
        of modules, as code there may read facts such as a dtype. Raises the errors of `gather`.
        """
        unit = self.unit_of(parameter)
        runs = self._gathers.active and not self._liveness.failed
        if unit is not None and runs and not self._gathers.is_used(unit):
            if not isinstance(threading.current_thread(), MicroBatchThread):
                self.gather(unit)

    def refuse_pickle(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise `ReleasedParameterError`, naming the first such parameter, if one of ``parameters`` is released, as a
        pickle would hold NaN."""
        for parameter in parameters:
            unit = self.unit_of(parameter)
            if unit is not None and unit.state is not UnitState.GATHERED:
                name = next(n for n, p in zip(unit.names, unit.parameters, strict=True) if p is parameter)
                raise ReleasedParameterError(
                    f"parameter '{name}' is released, and a pickle of its module would hold NaN. Write it inside "
                    "`engine.gathered(list(model.parameters()))`, or use engine.consolidated_state_dict()."
                )
