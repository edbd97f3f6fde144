"""The runtime of a partitioned model: the composition of its passes, hooks and agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import EngineGroups

from .agreement import Agreement, Liveness
from .arrivals import GradientArrivals
from .arriving_weights import WeightArrivals
from .calls import ModuleCalls
from .compilation import CompiledRegions
from .errors import PartitionError
from .gatherer import Gatherer
from .gradient_watch import GradientWatch
from .gradients import UnitGradients
from .held_gradients import HeldGradients
from .hooks import ModuleHooks
from .interception import Interception
from .interleaving import Interleaving
from .live import LiveElements
from .messages import StepNumber
from .ordered_gathers import OrderedGathers
from .ordered_reductions import OrderedReductions
from .pass_parts import PassParts
from .passes import Passes, forward_key
from .recovery import Recovery
from .reducer import Reducer
from .released_use import ReleasedUse
from .reopening import Reopening
from .residency import Residency
from .step_hook_watch import StepHookWatch
from .training_loop import FollowedLoop
from .unannounced import UnannouncedUse
from .unit import Unit
from .unit_by_unit import Around, Body, UnitByUnit
from .unit_watch import UnitWatch, WatchedUnits
from .user_edits import UserEdits
from .user_gradients import UserGradients
from .weight_passes import WeightPasses
from .zeroing import ZeroGrad, watch_modules

_LAST_WEIGHTS = 2.0  # seconds that an engine which ends waits for published weights


class Runtime:
    """Runs a partitioned model's passes (see [Note: the order of events] in passes.py); made by `partition`.

    Passes that gather sharded parameters, and backward passes that reduce, are collective.

    ``gradients``: of the trained units. ``groups``: the process groups, which `abort` destroys. ``residency``: keeps
    the shards. ``live``: counts gathered elements. ``arrivals``: published weights that are waited for at their first
    use. ``device``: where modules compute. ``prefetch_numel``, ``max_live_numel``, ``bucket_numel``: bounds in
    elements, of `PartitionOptions`. ``complete``: every backward pass reduces every unit, each when it has all its
    gradients.

    Attributes:
        units: the units, by index.
        gradients: the gradients of trained units, by unit index.
        loop: the training loop that drives the passes; `FollowedLoop.follow` sets it.
        passes: the forward and backward passes.
        gathers: the units that this rank gathers, and their order.
        gatherer, reducer: gather units and reduce gradients.
        edits, user_gradients, gradient_watch, step_hook_watch, released_use: find, apply or refuse uses and changes of
            parameters and gradients by user code.
        held_gradients: averaged gradients between backward and step.
        weight_passes: the pass over full weights that is open.
        hints: warnings of what a script probably did not mean.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        gradients: Sequence[UnitGradients],
        groups: EngineGroups,
        residency: Residency,
        live: LiveElements,
        arrivals: WeightArrivals,
        *,
        device: torch.device,
        prefetch_numel: int,
        max_live_numel: int,
        bucket_numel: int,
        complete: bool = False,
    ) -> None:
        self.units = list(units)
        self.gradients = {g.unit.index: g for g in gradients}
        self.groups = groups
        self.loop = FollowedLoop()
        self.weight_passes = WeightPasses()
        self._sharded = any(u.releasable for u in self.units)
        self._step = step = StepNumber()
        self._arrivals = arrivals
        self._liveness = Liveness(
            self._end_groups,
            self._half_written,
            sharded=self._sharded,
            can_reopen=groups.can_reopen,
        )
        arrivals.report_to(self._liveness.writing, self.weights_lost)
        self.edits = UserEdits(self.units, groups.control.world_size, groups.broadcast)
        self.user_gradients = UserGradients(gradients, self.loop)
        self.gathers = OrderedGathers(self.units, step)
        reductions = OrderedReductions(
            gradients, self.gathers, step, device, bucket_numel=bucket_numel, complete=complete
        )
        self._agreement = Agreement(
            groups.control,
            self._liveness,
            self.units,
            step,
            self.gathers,
            reductions,
            self.edits,
            self.user_gradients,
        )
        interleaving = Interleaving(self.gathers, reductions, self._agreement.agree_in_lock_step)
        self.gatherer = Gatherer(
            self.units,
            self.gathers,
            interleaving,
            self._agreement.request,
            residency,
            live,
            prefetch_numel=prefetch_numel,
            max_live_numel=max_live_numel,
        )
        self.reducer = Reducer(gradients, reductions, interleaving)
        unannounced = UnannouncedUse(self.units, self.gathers, self.gatherer, self.reducer, self._liveness)
        self._calls = ModuleCalls()
        self._watched_units = WatchedUnits()
        self.held_gradients = HeldGradients(
            gradients, self.user_gradients, self.reducer, self._agreement, self._calls, step
        )
        self.gradient_watch = GradientWatch(gradients, self.held_gradients.discard, self._never_reduced())
        self.step_hook_watch = StepHookWatch(self.units, self.gradients)
        self.released_use = ReleasedUse(unannounced, self.gathers, alone=groups.control.world_size == 1)
        parts = PassParts(
            units=self.units,
            loop=self.loop,
            control=groups.control,
            liveness=self._liveness,
            calls=self._calls,
            edits=self.edits,
            user_gradients=self.user_gradients,
            gathers=self.gathers,
            agreement=self._agreement,
            interleaving=interleaving,
            gatherer=self.gatherer,
            reducer=self.reducer,
            unannounced=unannounced,
            arrivals=GradientArrivals(
                self.units, self.gradients, self.gatherer, self.reducer, self._liveness, self._watched_units
            ),
            held_gradients=self.held_gradients,
            gradient_watch=self.gradient_watch,
            released_use=self.released_use,
            watched_units=self._watched_units,
            weights=arrivals,
            recovery=Recovery(groups, step, self.gathers, reductions, interleaving, self.gatherer, self.reducer),
        )
        self.passes = Passes(parts)
        self._reopening = Reopening(groups, parts, self.passes, gradients, reductions)
        self._hooks = ModuleHooks(model, self.units, self.passes, self._calls, unannounced, self.gathers, arrivals)
        self.hints = self._hooks.hints
        self._interception = Interception(model, self.units, unannounced)
        self._unit_by_unit = UnitByUnit(model, self.units, self.gradients, parts, self._hooks, device)
        self._compiled: CompiledRegions | None = None
        zero_grads = watch_modules(model, self.discard_gradients) if self.gradients else []
        ends = (zero_grad.remove for zero_grad in zero_grads)
        self._closing: list[Callable[[], object]] = [*ends, self.gradient_watch.end]

    @property
    def step(self) -> int:
        """The number of the running step, for tags of collectives and messages; set by the training loop."""
        return self._step.value

    @step.setter
    def step(self, number: int) -> None:
        """Set the number of the running step."""
        self._step.value = number

    # -- passes ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Start a backward pass. Collective if it gathers or reduces.

        Raises `PartitionError` inside `synced` and after a failed pass whose gradients were not zeroed, and `CommError`
        once a failure has ended the engine.
        """
        self.passes.begin_backward()

    def end_backward(self) -> None:
        """Finish the backward pass: wait for its reductions and release all units; do nothing if none is running.
        Collective if it gathers or reduces. Raises the errors of `Passes.end_backward`."""
        self.passes.end_backward()

    def compile(self, model: nn.Module, **options: Any) -> list[str]:
        """Compile ``model`` by torch.compile, region by region (see `CompiledRegions`); return the names of the
        regions. ``options``: arguments of torch.compile.

        A second call replaces the first.
        """
        if self._compiled is not None:
            self._compiled.remove()
        self._compiled = CompiledRegions(model, self.units, self._hooks, **options)
        return self._compiled.names

    def run_unit_by_unit(self, bodies: Sequence[Body], around_inputs: Around) -> None:
        """Run ``bodies``, each the forward and backward of one micro-batch, unit by unit; see `UnitByUnit.run`.

        ``around_inputs``: functions that return the contexts in which autograd saves the inputs of module calls.
        """
        self._unit_by_unit.run(bodies, around_inputs)

    def add_use(self, name: str, module: nn.Module, unit: Unit) -> None:
        """From now on gather ``unit`` also for the calls of ``module``, whose name in the model is ``name``."""
        self._hooks.add_use(name, module, unit)

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Let ranks call forward a different number of times inside the block, without backward. Every rank enters it.

        A rank that leaves the block takes part in the gathers of the others, and blocks, until all have left; it does
        not after an exception, or where nothing is sharded. Raises `PartitionError` if such a block is open already.
        """
        if self._agreement.synced:
            raise PartitionError("synced() is open already")
        self._agreement.synced = True
        try:
            yield
            if self._sharded:
                self._serve_others()
        finally:
            self._agreement.synced = False

    def pause(self) -> None:
        """Have module hooks neither gather nor release units until `resume`, as the user has gathered all parameters.

        Raises `PartitionError` inside a pass.
        """
        if self.gathers.active:
            raise PartitionError("the hooks were switched off inside a forward or backward pass; do it before or after")
        self._arrivals.wait()
        self._calls.paused = True

    def resume(self) -> None:
        """End `pause`: module hooks gather and release units again."""
        self._calls.paused = False

    def close(self) -> None:
        """Remove all hooks from the model, stop watching gradients and `zero_grad`, and call the functions given to
        `on_close`. Parameters stay as they are, sharded or gathered. Does not communicate."""
        if self._compiled is not None:
            self._compiled.remove()
        self._hooks.remove()
        self._interception.remove()
        for remove in self._closing:
            remove()

    def watch_units(self, watch: UnitWatch) -> None:
        """Have the methods of ``watch`` called when units compute, in place of any earlier watch; see `UnitWatch`."""
        self._watched_units.watch = watch

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Have ``optimizer.zero_grad`` discard the gradients that the engine holds too, until `close`."""
        self.on_close(ZeroGrad(optimizer, self.discard_gradients).remove)

    def discard_gradients(self, parameters: Iterable[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Discard the gradients of ``parameters`` (None: of all) since the last step.

        With ``set_to_none`` false they become zeros. Every rank calls it at the same point. After a failure, `reopen`
        comes first. Raises `PartitionError` inside a backward pass.
        """
        self.reopen("zero_grad")
        self.held_gradients.discard(parameters, set_to_none=set_to_none)

    def on_close(self, remove: Callable[[], object]) -> None:
        """Have `close` call ``remove``, after the functions that were given before."""
        self._closing.append(remove)

    # -- the other ranks ---------------------------------------------------------------------------------------------

    def agree(self, kind: str, name: str, payload: Any) -> list[Any]:
        """Exchange ``payload`` (plain data) with all ranks; return the payloads in rank order. Collective.

        ``kind`` and ``name`` say what the ranks meet for. Raises `DesyncError` unless they are the same everywhere, and
        the other errors of `Agreement.agree`.
        """
        return self._agreement.agree(kind, name, payload)

    def shard_changed(self, unit: Unit) -> None:
        """Record that this rank alone has changed its shard of ``unit``; the next agreement tells the other ranks."""
        self._agreement.note_changed(unit)

    def _serve_others(self) -> None:
        """Take part in the gathers of other ranks' forward passes, without computing, and block until all ranks leave
        `synced`."""
        while (running := self._agreement.meet_done()) is not None:
            self.gatherer.begin(forward_key(running))
            self.gatherer.end(joined=True)

    # -- failures ----------------------------------------------------------------------------------------------------

    def weights_lost(self, failure: BaseException) -> None:
        """End this runtime because of ``failure``, by which published weights did not arrive."""
        self.failed_in("step", failure, awaited=True)

    def _end_groups(self, failure: BaseException) -> None:
        """Destroy the process groups because of ``failure``, telling the other ranks why, once published weights have
        arrived or some seconds have passed."""
        self._arrivals.wait_briefly(_LAST_WEIGHTS)
        self.groups.abort(failure, when=f"in step {self._step.value}")

    def _half_written(self) -> str | None:
        """Return words for published weights that did not arrive, or for the tier's update that failed in the middle
        and has left values half written; None if there is neither."""
        if self._arrivals.failure is not None:
            return "the step"
        tier = next((unit.states for unit in self.units if unit.states is not None), None)
        return None if tier is None else tier.half_written()

    @property
    def failed(self) -> bool:
        """True if an earlier failure has ended this runtime, until `reopen`."""
        return self._liveness.failed

    def check_alive(self) -> None:
        """Raise `CommError`, which says what to do, if an earlier failure has ended this runtime."""
        self._liveness.check()

    def reopen(self, call: str) -> None:
        """Recover from a failure that has ended this runtime, with the weights from before the step (see `Reopening`).

        Collective after a failure; else returns at once. ``call``: the engine's method, for messages. Raises
        `CommError` if the runtime cannot continue.
        """
        self._reopening.reopen(call)

    def writing(self, what: str, *, weights: bool = False) -> AbstractContextManager[None]:
        """Return a context for code that writes shards, masters or states; if it is interrupted by a failure that ends
        the engine, `reopen` is refused. ``what``: what writes, for messages. ``weights``: it gives weights new
        values outside a step; a pass over full weights that is open ends then, and every rank calls this at the same
        point."""
        if weights:
            self.weight_passes.end(f"{what} has changed weights")
        return self._liveness.writing(what)

    def abort(self, failure: BaseException) -> None:
        """End this runtime because of ``failure``: tell the other ranks why and destroy all its process groups, so that
        no rank waits for this one. Does nothing if an earlier failure has ended it. See `reopen`.

        Waits for no other rank, but after that, without a limit, for an update that a tier still runs on this one.
        """
        self._liveness.end(failure)

    def failed_in(self, call: str, failure: BaseException, *, awaited: bool = False) -> bool:
        """Abandon the open pass after ``failure`` in ``call``; return whether the engine can continue. If not, end it.

        ``awaited``: other ranks wait for this one even if no pass is open (see `Passes.failed_in`).
        """
        return self.passes.failed_in(call, failure, awaited=awaited)

    def refuse_torn(self, call: str) -> None:
        """Raise `PartitionError`, naming ``call`` (the engine's method), if a failed backward pass has left only a part
        of its gradients and they were not discarded since."""
        self.held_gradients.refuse_torn(call)

    def _never_reduced(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that require gradients but that no optimizer trains, so that no reduction
        averages their gradients; empty with a single rank."""
        if self.groups.control.world_size == 1:
            return {}
        untrained = [u for u in self.units if not u.plan.trainable]
        return {n: p for u in untrained for n, p in zip(u.names, u.parameters, strict=True) if p.requires_grad}
