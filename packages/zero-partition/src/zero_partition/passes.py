"""The forward and the backward pass of a partitioned model.

[Note: the order of events] A **forward pass** is the call of the outermost hooked module.

1. `enter_module` of the outermost module begins it: gradients that the user wrote are adopted, averages that
   ``.grad`` shows are hidden (autograd would add to them), and casts of parameters are noted.
2. Where parameters are sharded, the ranks agree on the pass, its order of gathers begins, and what autograd saves
   is watched.
3. `enter_module` of every module gathers its units; the gathers that come next are issued ahead.
4. `exit_module` releases the units whose modules have all run.
5. `exit_module` of the outermost module ends the pass: gathers that this rank did not need are joined, and everything
   is released; the unit that backward gathers first keeps its memory, and backward restores it without a gather. Where
   the order may lack units that another rank needs, the ranks meet. A pass that failed is abandoned instead
   (recovery.py).

A **backward pass** lasts from `begin_backward` to `end_backward`. When the user calls ``loss.backward()``, the first
gradient, or the first use of a unit, begins it, and the end of autograd's run ends it.

6. `begin_backward`: published weights that forward has not used are waited for, gradients that the user wrote are
   adopted, averages that ``.grad`` shows are hidden.
7. Where it gathers or reduces, the ranks agree on the pass, and gradients that came too late for their unit's reduction
   in the pass before are reduced. Its agreed orders of gathers and of reductions begin; if it has both, they are
   interleaved.
8. `before_backward` gathers the units that autograd is about to read, and releases frozen ones that it has finished.
9. `gradient_ready` puts a finished gradient into its unit's buffer (arrivals.py). When a unit's last gradient has
   arrived and all reductions before it in the order are started, its reduction is started, and the unit is released.
10. `end_backward`: gradients left to the user's hooks are taken, and the remaining reductions are started.
11. Gathers that this rank did not need are joined, everything is released, and the reductions are waited for. The
    ranks meet as in 5.
12. Where every rank keeps full averages (stage 0), ``.grad`` shows them; elsewhere it is watched (gradient_watch.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .agreement import END_OF_PASS
from .dispatch_modes import outside_modes
from .end_of_backward import EndOfBackward
from .errors import PartitionError
from .gradient_hook import GradientHook
from .hooks import surroundings
from .messages import distinct
from .pass_parts import PassParts
from .recovery import add_advice
from .saved_views import SavedViews, explain_refused_tracing, explain_refused_transform
from .unit import Unit

BACKWARD = "backward"
FORWARD = "forward"
STEP = "step"


class _BackwardTerms(NamedTuple):
    """The agreement of all ranks before a backward pass.

    Attributes:
        pending: indices of the units that the pass may reduce.
        late: indices of the units to reduce first, in order: they have gradients of the pass before that came too late,
            which must not be added to this pass's in the parameters' dtype.
        restores: every rank has kept the memory of the same unit since forward, so that none gathers it again.
    """

    pending: set[int]
    late: list[int]
    restores: bool


class Passes:
    """Runs the passes of one partitioned model; its hooks call these methods. See [Note: the order of events].

    A pinned unit is one that the user keeps gathered; passes neither gather nor release it. ``parts``: the
    collaborators, of one engine.
    """

    def __init__(self, parts: PassParts) -> None:
        self._units = parts.units
        self._loop = parts.loop
        self._control = parts.control
        self._liveness = parts.liveness
        self._calls = parts.calls
        self._edits = parts.edits
        self._user_gradients = parts.user_gradients
        self._gathers = parts.gathers
        self._agreement = parts.agreement
        self._interleaving = parts.interleaving
        self._gatherer = parts.gatherer
        self._reducer = parts.reducer
        self._unannounced = parts.unannounced
        self._arrivals = parts.arrivals
        self._held_gradients = parts.held_gradients
        self._gradient_watch = parts.gradient_watch
        self._released_use = parts.released_use
        self._watched_units = parts.watched_units
        self._recovery = parts.recovery
        self._weights = parts.weights
        self._sharded = any(unit.releasable for unit in parts.units)
        self._frozen = [
            (n, p) for u in parts.units for n, p in zip(u.names, u.parameters, strict=True) if not p.requires_grad
        ]
        self._saved = SavedViews(self._gathers.unit_of_storage, self.before_backward)
        self._last_forward: str | None = None
        self._thread = 0
        self._check_buffers: Callable[[], None] | None = None

    def before_evaluation(self, check: Callable[[], None]) -> None:
        """Set ``check`` as the function to call before each forward pass without gradients, at stage 3; it replaces an
        earlier one. Passes with gradients do without, as the step after them finds the same by the norm."""
        self._check_buffers = check

    # -- the forward pass --------------------------------------------------------------------------------------------

    def enter_module(self, name: str, units: Sequence[Unit]) -> bool:
        """Gather the releasable ones of ``units`` for the forward of module ``name``; first begin a pass if it is the
        outermost module, unless backward recomputes it. Outside backward tell the `UnitWatch`.

        Return whether the call is part of a pass. It is not while hooks are paused, inside torch.func's transforms
        (`grad`, `jvp`, …) or where it is only traced (`surroundings`): such calls concern no parameter's ``.grad``, and
        their tensors have no memory to send. Raises `PartitionError` in the latter two if a parameter is not gathered
        by the user; for a module called in a thread other than the pass's; and for a frozen parameter that requires
        gradients now.
        """
        if self._calls.paused:
            return False
        if self._calls.outermost is None:
            around = surroundings(self._units)
            if around:
                self._refuse_in(around)
                return False
            self._calls.outermost = name
            self._control.record_call()
            self._unannounced.pass_begins(trains=torch.is_grad_enabled())
            self._check_frozen()
            if not self._calls.in_backward:
                self._thread = threading.get_ident()
                self._begin_forward(name)
            elif self._unannounced.trains and self._first_unpinned() is not None:
                self._saved.open_in_backward()
        elif self._sharded and not self._calls.in_backward and self._thread != threading.get_ident():
            raise PartitionError(
                f"module '{name}' was called in another thread than the forward pass that it is a part of: threads run "
                "in another order on each rank, and gathers at stage 3 have one. Call it in the pass's own thread, or "
                "use stage 2."
            )
        for unit in units:
            if self._unannounced.trains:
                self._reducer.mark_ran(unit.index)
            if unit.releasable:
                self._gatherer.gather(unit)
                self._calls.begin_call(unit)
        watch = self._watched_units.watch
        if watch is not None and not self._calls.in_backward:
            watch.enters(units)
        return True

    def exit_module(
        self, name: str, units: Sequence[Unit], aliased: Sequence[Unit], failure: BaseException | None
    ) -> None:
        """Release those of ``units`` whose modules have all run; after the outermost module, end the pass. Do neither
        in a forward that backward recomputes.

        ``name``: of the module that has run. ``units``: those that it uses. ``aliased``: units whose memory the
        module's output shares, which stays when they are released. ``failure``: exception that the forward raised, or
        None.
        """
        if self._calls.paused:
            return
        watch = self._watched_units.watch
        if watch is not None and not self._calls.in_backward:
            watch.leaves(units)
        for unit in aliased:
            unit.lent = True
        for unit in units:
            if unit.releasable:
                self._calls.end_call(unit, name)
                self._release_when_done(unit)
        if name == self._calls.outermost:
            self._calls.outermost = None
            if self._calls.in_backward:
                self._saved.close()
            else:
                self._end_forward(name, failure)

    def caller_done(self, name: str, units: Sequence[Unit]) -> None:
        """Record that module ``name`` has run in this pass; it uses parameters of ``units`` that its submodules return.
        Outside backward, release those of the units whose modules have all run."""
        for unit in units:
            self._calls.note_run(unit, name)
            self._release_when_done(unit)

    def _begin_forward(self, name: str) -> None:
        """Begin the forward pass whose outermost module is ``name``: steps 1 and 2 of [Note: the order of events].
        Collective at stage 3, where a pass without gradients first runs the check that `before_evaluation` was given.
        """
        self._gradient_watch.pause()
        self._user_gradients.take()
        if self._unannounced.trains:
            self._held_gradients.hide()
        key = forward_key(name)
        self._edits.forward_begins(key)
        if not self._sharded:
            return
        if not self._unannounced.trains and self._check_buffers is not None:
            self._check_buffers()
        self._calls.restart()
        self._agreement.agree(FORWARD, name)
        self._gatherer.begin(key, before=BACKWARD if self._unannounced.trains else None)
        self._last_forward = key
        if self._unannounced.trains and self._first_unpinned() is not None:
            self._saved.open()

    def _release_when_done(self, unit: Unit) -> None:
        """Release ``unit`` if all its modules have run in this forward pass; do nothing in backward."""
        if not self._calls.in_backward and self._calls.is_done(unit):
            self._gatherer.release(unit)

    def _end_forward(self, name: str, failure: BaseException | None) -> None:
        """End the forward pass whose outermost module is ``name``: resume watching gradients and parameters outside
        passes, and where parameters are sharded do step 5 of [Note: the order of events]. Collective at stage 3.

        ``failure``: exception that the forward raised, or None; the pass is then abandoned.
        """
        self._edits.forward_ends()
        self._gradient_watch.resume(hidden=self._unannounced.trains)
        if failure is not None:
            explain_refused_tracing(failure, self._units[0].names[0])
        elif self._unannounced.trains:
            self._control.record_forward()
        if not self._sharded:
            return
        self._saved.close()
        if failure is not None:
            absent = self._first_unpinned()
            if absent is not None:
                explain_refused_transform(failure, absent.names[0])
            self.failed_in(FORWARD, failure)
            return
        self._gatherer.end()
        if self._unannounced.trains:
            self._released_use.forward_ended()
        self._agreement.agree(END_OF_PASS, self._gathers.key)

    # -- the backward pass -------------------------------------------------------------------------------------------

    @outside_modes
    def begin_backward(self) -> None:
        """Start a backward pass (steps 6 and 7). Collective if it gathers or reduces.

        Raises `PartitionError` inside `Runtime.synced` and after a failed pass whose gradients were not zeroed, and
        `CommError` once a failure has ended the engine.
        """
        self._liveness.check()
        self._control.record_call()
        if self._agreement.synced:
            raise PartitionError(
                "backward was called inside synced(), where ranks may do different things; leave it first"
            )
        self._held_gradients.refuse_torn(BACKWARD)
        self._weights.wait()
        self._gradient_watch.end()
        self._user_gradients.take()
        self._held_gradients.hide()
        self._held_gradients.awaits_step = True
        reduces = self._loop.reduces_now()
        self._calls.in_backward = True
        if not reduces:
            self._reducer.forget_late()
        if not self._sharded and not reduces:
            return
        pending, late, restores = self._agree_backward(reduces=reduces)
        self._reducer.reduce_scatter_now(late)
        if self._sharded:
            self._gatherer.begin(BACKWARD, like_reversed=self._last_forward, restores=restores)
        if self._sharded and reduces:
            self._interleaving.begin()
        if reduces:
            self._reducer.begin(pending)

    def _agree_backward(self, *, reduces: bool) -> _BackwardTerms:
        """Meet the other ranks before a backward pass, and return what holds for all of them. ``reduces``: this rank's
        pass reduces gradients. Collective."""
        mine = [self._reducer.pending(), self._reducer.late()] if reduces else [[], []]
        everyones = distinct(self._agreement.agree(BACKWARD, "", [*mine, self._gathers.kept]))
        pending, late = ({unit for one in everyones for unit in one[n]} for n in (0, 1))
        return _BackwardTerms(pending, sorted(late), len({one[2] for one in everyones}) == 1)

    def before_backward(self, units: Sequence[Unit]) -> None:
        """Gather the releasable ones of ``units``, whose parameters autograd is about to read, and release frozen units
        that it has finished; begin a backward pass if none is running. Under ``create_graph`` the new graph keeps the
        units' memory."""
        if not self._calls.in_backward:
            self._begin_plain_backward()
        for unit in units:
            if unit.releasable:
                self._gatherer.gather(unit)
                if self._unannounced.trains:
                    self._reducer.mark_ran(unit.index)
                if torch.is_grad_enabled():  # create_graph: the new graph saves views, and nothing brings those back
                    unit.lent = True
                self._gatherer.release_before(unit, self._calls.is_running)

    def gradient_ready(self, unit: int, number: int, hook: GradientHook) -> None:
        """Take the finished gradient of one parameter; begin a backward pass if none is running.

        ``unit``: index of its unit. ``number``: the parameter's index in the unit. ``hook``: the parameter's hook that
        autograd has called.
        """
        if not self._calls.in_backward:
            self._gradient_watch.end()  # else it would take what follows for the user's
            self._arrivals.take_left()
            parameter = self._units[unit].parameters[number]
            gradient, parameter.grad = parameter.grad, None  # else the pass would take it for the user's
            self._begin_plain_backward()
            parameter.grad = gradient
        self._arrivals.ready(unit, number, hook)

    @outside_modes
    def end_backward(self) -> None:
        """Finish the backward pass (steps 10 to 12): wait for its reductions and release all units. Do nothing if none
        is running. Collective if it gathers or reduces. Raises `CommError` if a failure has ended the engine, and the
        errors of `Reducer.settle_late`."""
        if not self._calls.in_backward:
            return
        self._liveness.check()  # a pass that ended the engine leaves reductions that nobody answers
        self._arrivals.take_left()
        reduces = self._reducer.active
        self._reducer.start_rest()
        self._interleaving.leave_lock_step()
        self._gatherer.end()
        self._reducer.finish()
        if reduces:
            self._reducer.settle_late()
        self._interleaving.end()
        if self._sharded:
            self._agreement.agree(END_OF_PASS, self._gathers.key)
        self._calls.in_backward = False
        shown = self._loop.reduces_now()
        if shown:
            self._held_gradients.show()
        self._gradient_watch.begin(shown=shown)

    def _begin_plain_backward(self) -> None:
        """Begin a pass for the user's ``loss.backward()``, inside autograd's run, and queue a callback of autograd that
        ends the pass with the run, or recovers if the run raises. Collective as `begin_backward` is. Raises
        `PartitionError` if the training loop allows no such call now."""
        refusal = self._loop.refuse_plain_backward()
        if refusal is not None:
            raise PartitionError(refusal)
        # autograd alone holds the callback: a variable here would keep it as long as what begin_backward raises
        torch.autograd.Variable._execution_engine.queue_callback(
            EndOfBackward(self.end_backward, self._recover_backward)
        )
        self.begin_backward()

    def _recover_backward(self, failure: BaseException | None) -> None:
        """Abandon the pass of a ``loss.backward()`` that raised (see `failed_in`); do nothing if the engine has ended
        already.

        ``failure``: what it raised; None if that is not known.
        """
        if not self._liveness.failed:
            cause = "loss.backward() raised on this rank before its gradients were complete"
            self.failed_in(BACKWARD, PartitionError(cause) if failure is None else failure)

    # -- failures ----------------------------------------------------------------------------------------------------

    def failed_in(self, call: str, failure: BaseException, *, awaited: bool = False) -> bool:
        """Abandon the open pass after ``failure`` in ``call``; return whether the engine can continue with the next
        pass.

        It cannot if another rank may be waiting for this one; the engine is then ended. ``call``: "forward",
        "backward", "step" or the engine's method. ``awaited``: other ranks wait for this one even if no pass is open.
        May be called again. Raises ``failure`` if recovery itself fails.
        """
        in_backward = self._calls.in_backward
        goes_on = False
        try:
            goes_on = not self._liveness.failed and self._recovery.abandon_pass(call, failure, awaited=awaited)
        except Exception as second:  # out of memory again, a tier that fails: the first cause is what counts
            raise failure from second
        finally:
            if not goes_on:
                self._liveness.end(failure)
            self.forget_pass()
        if not goes_on:
            return False
        if in_backward or call == STEP:
            self._reducer.torn = f"{type(failure).__name__}: {failure}"
        self._recovery.announce_failure(call, failure)
        add_advice(failure, torn=self._reducer.torn is not None, half_written=self._liveness.half_written())
        return True

    def forget_pass(self) -> None:
        """Forget everything that this rank has recorded of the running pass, which has failed."""
        self._arrivals.forget_left()
        self._saved.close()
        self._calls.forget_calls()

    # -- refusals ----------------------------------------------------------------------------------------------------

    def _first_unpinned(self) -> Unit | None:
        """Return the first unit, in module order, that passes gather and release: releasable and not pinned by the
        user; None if there is none. It may be gathered now."""
        return next((unit for unit in self._units if unit.releasable and not unit.pinned), None)

    def _refuse_in(self, around: str) -> None:
        """Raise `PartitionError` if the model has a releasable unit that the user has not gathered, as units cannot be
        gathered in ``around``, a phrase for what the model was called in ("torch.func.grad")."""
        absent = self._first_unpinned()
        if absent is not None:
            raise PartitionError(
                f"the model was called inside {around}, where sharded parameters such as '{absent.names[0]}' cannot be "
                "gathered. Open engine.gathered(model.parameters()) around it, or use torch.autograd.grad for "
                "derivatives and a copy.deepcopy of the model for tracing."
            )

    def _check_frozen(self) -> None:
        """Raise `PartitionError`, naming the parameter, if one that was frozen when the engine was made requires
        gradients now."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise PartitionError(
                    f"parameter '{name}' was frozen when the engine was made and requires gradients now: it has no "
                    "master, no gradient buffer and no optimizer state. Call destroy() and initialize again."
                )


def forward_key(name: str) -> str:
    """Return the key under which the order of gathers of module ``name``'s forward pass is learned."""
    return f"forward of {name or 'the model'}"
