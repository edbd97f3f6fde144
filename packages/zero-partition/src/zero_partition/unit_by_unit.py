"""Train all micro-batches of a step unit by unit, so that each unit is gathered twice per step, not per micro-batch.

[Note: unit by unit] Each micro-batch's forward and backward run as the user wrote them, in a thread of their own
(micro_batch_threads.py), of which one runs at a time. A call of a module that uses units is a *visit* (visits.py): the
thread waits there, and the driver, in the thread that trains, runs it:

1. When every micro-batch waits for the same module, its units are gathered, the module's forward runs for one
   micro-batch after the other, and each goes on to its next visit; then the units are released. Autograd keeps a
   visit's inputs only.
2. The first micro-batch that comes to its backward ends the forward pass: the ranks compare the modules that it
   visited. The last module is not released; each micro-batch runs its forward, the loss and its backward at once.
3. Backward visits the modules in the other order: the forward runs again and is backpropagated, and the units'
   gradients are reduced, one micro-batch after the other, as in the ordinary loop.

The order of gathers of the forward pass is learned as any pass's is; that of the backward pass is known from it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from .agreement import END_OF_PASS
from .errors import PartitionError
from .gradients import UnitGradients, Unreduced
from .hooks import ModuleHooks
from .micro_batch_threads import MicroBatchThread, end_all
from .pass_parts import PassParts
from .unit import Unit
from .visited_modules import VisitedModules
from .visits import Asked, Place, Visit

CALL = "train_batch"
_FORWARD = "forward unit by unit"
_BACKWARD = "backward unit by unit"

Body = Callable[[Callable[[torch.Tensor], None]], None]
"""The code of one micro-batch: calls the model, and the function that it is given with the tensor to backpropagate."""
Around = Sequence[Callable[[], AbstractContextManager[object]]]
"""Functions that return the contexts in which autograd saves the inputs of a visit."""


class UnitByUnit:
    """Runs the micro-batches of a step on ``model`` unit by unit (see [Note: unit by unit]).

    ``units``: all of the model. ``gradients``: of the trained units, by index. ``parts``: of the same engine.
    ``hooks``: know which units a module uses. ``device``: where modules compute.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        gradients: dict[int, UnitGradients],
        parts: PassParts,
        hooks: ModuleHooks,
        device: torch.device,
    ) -> None:
        self._gradients = gradients
        self._parts = parts
        self._modules = VisitedModules(model, hooks, units)
        self._device = device
        self._known: set[str] = set()

    def run(self, bodies: Sequence[Body], around_inputs: Around) -> None:
        """Run ``bodies``, one for each micro-batch, and reduce their gradients. Collective: every rank has the same
        number.

        ``around_inputs``: functions that return the contexts in which autograd saves the inputs of visits. The first
        micro-batch draws random numbers from the present generators, which it advances; each other one from generators
        seeded with the present ones and its number. Raises `PartitionError` for a model that has no units to go by, for
        micro-batches that visit other modules than the first, and if visited modules differ between ranks.
        """
        self._parts.liveness.check()
        places = self._modules.find()
        threads = [MicroBatchThread(n, partial(body, _backpropagate), self._device) for n, body in enumerate(bodies)]
        with _calls_diverted(places, partial(_call_as_visit, around_inputs)), self._passes_paused():
            _StepByUnit(self._gradients, self._parts, threads, self._known).run()

    @contextmanager
    def _passes_paused(self) -> Iterator[None]:
        """Have the module hooks do nothing inside the block, as the driver gathers the units."""
        self._parts.calls.paused = True
        try:
            yield
        finally:
            self._parts.calls.paused = False


class _StepByUnit:
    """Runs one step's micro-batches through the visits, forward and backward (see [Note: unit by unit]).

    ``gradients``: of the trained units, by index. ``parts``: of the same engine. ``threads``: the micro-batches', in
    order. ``known``: the names of the modules that were visited before; those visited here are added to it.
    """

    def __init__(
        self,
        gradients: dict[int, UnitGradients],
        parts: PassParts,
        threads: Sequence[MicroBatchThread],
        known: set[str],
    ) -> None:
        self._gradients = gradients
        self._parts = parts
        self._threads = threads
        self._known = known
        self._visited: list[Place] = []
        self._turn: list[Unit] = []
        self._left: list[int] = []
        self._unfinished: dict[tuple[int, int], Unreduced] = {}

    def run(self) -> None:
        """Run all micro-batches to their end. If one raises, end all threads and raise its error; the random generators
        then have the states from before this call."""
        generators = self._threads[0].generators.copy()
        for number, thread in enumerate(self._threads[1:], start=1):
            thread.generators.fork(number)
        self._begin()
        try:
            for thread in self._threads:
                thread.start()
                thread.advance()
            while (place := self._next_forward()) is not None:
                self._visit_forward(place)
            while (place := self._next_backward()) is not None:
                self._visit_backward(place)
            self._end()
            generators = self._threads[0].generators
            self._parts.calls.in_backward = False  # after a failure it says that gradients are incomplete
        finally:
            end_all(self._threads)
            generators.install()
            self._release_turn()
            self._parts.arrivals.reduces_each = False

    def _begin(self) -> None:
        """Begin the forward pass: adopt gradients that the user has written, agree with the other ranks, and reduce
        late gradients of the pass before. Collective."""
        parts = self._parts
        parts.held_gradients.refuse_torn(CALL)
        parts.gradient_watch.end()
        parts.user_gradients.take()
        parts.held_gradients.hide()
        parts.unannounced.pass_begins(trains=True)
        parts.calls.restart()
        answers = parts.agreement.agree(CALL, f"of {len(self._threads)} micro-batches", parts.reducer.late())
        parts.reducer.reduce_scatter_now(sorted({unit for late in answers for unit in late}))
        parts.gatherer.begin(_FORWARD)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _next_forward(self) -> Place | None:
        """Return the module whose forward every micro-batch waits for; None once all wait for a backward or have ended.
        Raises `PartitionError` if they wait for different ones."""
        return self._place_of([thread.request for thread in self._threads], backward=False)

    def _visit_forward(self, place: Place) -> None:
        """Run the forward of the module at ``place`` for every micro-batch, its units gathered. If this is the last
        module of the forward pass, run its backward for each micro-batch too."""
        gathered = [unit for unit in place.units if unit.releasable]
        self._visited.append(place)
        for unit in gathered:
            self._parts.gatherer.gather(unit)
            self._parts.calls.begin_call(unit)
        for thread in self._threads:
            visit = self._run_forward(thread)
            if thread.request is not None and thread.request.gradients is None:
                visit.drop_graph()
                continue
            if thread is self._threads[0]:
                self._turn_around(gathered)
            if thread.request is not None and thread.request.visit is visit:
                self._run_backward(thread, place)
            visit.drop_graph()
        for unit in gathered:
            self._parts.calls.end_call(unit, place.name)
            for inside in place.members(unit):
                self._parts.calls.note_run(unit, inside)
            if not self._parts.calls.in_backward and self._parts.calls.is_done(unit):
                self._parts.gatherer.release(unit)
        self._release_turn()

    def _run_forward(self, thread: MicroBatchThread) -> Visit:
        """Run the forward that the micro-batch of ``thread`` waits for, let its code continue to the next visit, and
        return the visit."""
        visit: Visit = thread.request.visit
        with thread.generators.in_force():
            result = visit.forward(thread.request.tensors, is_new=visit.place.name not in self._known)
        self._known.add(visit.place.name)
        thread.advance(result)
        return visit

    def _turn_around(self, gathered: Sequence[Unit]) -> None:
        """End the forward pass and begin the backward pass. Raises `PartitionError` if the ranks have visited different
        modules. Collective.

        ``gathered``: units of the running visit, which stay gathered until `_release_turn`.
        """
        parts = self._parts
        for unit in gathered:
            unit.pin()
        self._turn = list(gathered)
        parts.gatherer.end()
        names = hashlib.sha256("\n".join(place.name for place in self._visited).encode()).hexdigest()[:16]
        if len(set(parts.agreement.agree(END_OF_PASS, _FORWARD, names))) > 1:
            raise PartitionError(
                f"{CALL}: the ranks' micro-batches visit different modules, so their gradients cannot be reduced unit "
                "by unit. Use the ordinary loop of engine(batch), engine.backward and engine.step."
            )
        self._left = [unit.index for place in self._visited for unit in place.units]
        parts.held_gradients.awaits_step = True
        parts.calls.in_backward = parts.arrivals.reduces_each = True
        before = self._visited[-2::-1]
        order = dict.fromkeys(unit.index for place in before for unit in place.units if unit.releasable)
        parts.gatherer.begin(_BACKWARD, order=list(order))
        for unit in gathered:
            parts.gathers.adopt(unit)

    def _release_turn(self) -> None:
        """Release the units that `_turn_around` has kept gathered; do nothing if there are none."""
        turn, self._turn = self._turn, []
        for unit in turn:
            unit.unpin()

    # -- backward ----------------------------------------------------------------------------------------------------

    def _next_backward(self) -> Place | None:
        """Return the module whose backward every micro-batch waits for; None once all have ended. Raises
        `PartitionError` if they wait for different ones."""
        return self._place_of([thread.request for thread in self._threads], backward=True)

    def _visit_backward(self, place: Place) -> None:
        """Run the backward of the module at ``place`` for every micro-batch, its units gathered; release each unit that
        no later visit uses."""
        gathered = [unit for unit in place.units if unit.releasable]
        for unit in gathered:
            self._parts.gatherer.gather(unit)
        for thread in self._threads:
            self._run_backward(thread, place)
        for unit in gathered:
            if unit.index not in self._left:
                self._parts.gatherer.release(unit)

    def _run_backward(self, thread: MicroBatchThread, place: Place) -> None:
        """Run the backward that the micro-batch of ``thread`` waits for at ``place``, start reducing the gradients that
        are complete then, and let its code continue to the next visit."""
        asked: Asked = thread.request
        last = thread is self._threads[-1]
        number = self._threads.index(thread)
        trained = [unit.index for unit in place.units if unit.index in self._gradients]
        for index in trained:
            self._gradients[index].put_unreduced(self._unfinished.pop((number, index), None))
        gradients = asked.visit.backward(asked.tensors, asked.gradients or ())
        self._parts.arrivals.take_left()
        complete = []
        for index in dict.fromkeys(unit.index for unit in place.units):
            if last:
                self._left.remove(index)
            remaining = self._left.count(index) - (0 if last else 1)
            if index in trained and remaining:
                self._unfinished[number, index] = self._gradients[index].take_unreduced()
            elif index in trained:
                complete.append(index)
        self._parts.reducer.start_now(complete)
        thread.advance(gradients)
        self._parts.arrivals.take_left()
        self._parts.reducer.start_now(self._parts.reducer.unreduced())

    def _end(self) -> None:
        """End the backward pass: reduce gradients that are left, and zeros for trained units that got none; wait for
        all reductions. Collective."""
        parts = self._parts
        for number, index in sorted(self._unfinished):
            self._gradients[index].put_unreduced(self._unfinished[number, index])
            parts.reducer.start_now([index])
        silent = {i for p in self._visited for i in (u.index for u in p.units) if i in self._gradients}
        parts.reducer.start_now(sorted(index for index in silent if not self._gradients[index].is_reduced))
        parts.reducer.finish()
        parts.gatherer.end()
        parts.agreement.agree(END_OF_PASS, _BACKWARD)
        parts.gradient_watch.begin(shown=False)

    def _place_of(self, requests: Sequence[Asked | None], *, backward: bool) -> Place | None:
        """Return the module that all ``requests`` (by micro-batch, None for one that has ended) wait for; None if this
        part of the step is over for all. Raises `PartitionError` if they differ.

        ``backward``: look for backward visits, whose part is over when all have ended; else for forward visits, whose
        part is over when all wait for a backward.
        """
        kinds = [None if r is None else (r.visit.place.name, r.gradients is not None) for r in requests]
        first = kinds[0]
        for number, kind in enumerate(kinds):
            if kind != first:
                raise PartitionError(
                    f"{CALL}: micro-batch 0 {_describe_request(first)} while micro-batch {number} "
                    f"{_describe_request(kind)}. Every micro-batch "
                    "has to visit the same modules in the same order; else use the ordinary loop of engine(batch), "
                    "engine.backward and engine.step."
                )
        request = requests[0]
        if request is None or (request.gradients is not None) is not backward:
            return None
        return request.visit.place


def _backpropagate(loss: torch.Tensor) -> None:
    """Run backward on ``loss`` in the calling thread alone, that of its micro-batch, even where autograd would use a
    thread for each accelerator: a visit waits in the thread that meets it."""
    thread = threading.current_thread()
    if isinstance(thread, MicroBatchThread):
        thread.backpropagates = True
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(loss)


def _describe_request(kind: tuple[str, bool] | None) -> str:
    """Return words for an error message about what a micro-batch does.

    ``kind``: None if it has ended, else its module's name and whether it waits for the module's backward.
    """
    if kind is None:
        return "has ended"
    return f"runs {'the backward of ' if kind[1] else ''}module '{kind[0]}'"


def _call_as_visit(around_inputs: Around, place: Place, *args: Any, **kwargs: Any) -> Any:
    """Call the module at ``place`` with ``args`` and ``kwargs`` and return its result: as a visit in a micro-batch's
    thread, directly in any other. ``around_inputs``: the contexts in which autograd saves the visit's inputs."""
    thread = threading.current_thread()
    if not isinstance(thread, MicroBatchThread):
        return place.call(*args, **kwargs)
    return Visit(place, thread).call(args, kwargs, around_inputs)


@contextmanager
def _calls_diverted(places: Sequence[Place], call: Callable[..., Any]) -> Iterator[None]:
    """Have calls of the modules at ``places`` run ``call(place, *args, **kwargs)`` instead, inside the block."""
    before = [place.module._compiled_call_impl for place in places]
    for place in places:
        place.module._compiled_call_impl = partial(call, place)
    try:
        yield
    finally:
        for place, compiled in zip(places, before, strict=True):
            place.module._compiled_call_impl = compiled
