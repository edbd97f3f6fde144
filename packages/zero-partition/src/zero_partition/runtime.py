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
from .calls import ModuleCalls
from .compilation import CompiledRegions
from .errors import PartitionError
from .gatherer import Gatherer, OrderedGathers
from .gradient_watch import GradientWatch
from .gradients import UnitGradients
from .held_gradients import HeldGradients
from .hooks import ModuleHooks
from .interception import Interception
from .interleaving import Interleaving
from .live import LiveElements
from .messages import StepNumber
from .passes import Passes, PassParts, forward_key
from .recovery import Recovery
from .reducer import OrderedReductions, Reducer
from .released_use import ReleasedUse
from .reopening import Reopening
from .residency import Residency
from .step_hook_watch import StepHookWatch
from .training_loop import FollowedLoop
from .unannounced import UnannouncedUse
from .unit import Unit
from .unit_watch import UnitWatch, WatchedUnits
from .user_edits import UserEdits
from .user_gradients import UserGradients
from .zeroing import ZeroGrad, watch_modules


class Runtime:
    """Runs a partitioned model's passes (see [Note: the order of events] in passes.py); made by `partition`.

    Passes of sharded parameters, and backward passes that reduce, are agreed by all ranks.

    Attributes:
        units: the units, by index.
        gradients: those of trained units, by unit index.
        loop: whoever drives the training loop; `FollowedLoop.follow` names it.
        passes: the forward and backward passes.
        gathers: which units this rank gathers, in which order.
        gatherer, reducer: what gathers units and reduces gradients.
        edits, user_gradients, gradient_watch, step_hook_watch, released_use: what user code does to parameters and
            gradients.
        held_gradients: averaged gradients between backward and step.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        gradients: Sequence[UnitGradients],
        groups: EngineGroups,
        residency: Residency,
        live: LiveElements,
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
        self._sharded = any(u.releasable for u in self.units)
        self._step = step = StepNumber()
        self._liveness = Liveness(
            lambda failure: groups.abort(failure, when=f" (in step {step.value})"),
            sharded=self._sharded,
            can_reopen=groups.can_reopen,
        )
        self.edits = UserEdits(self.units, groups.control.world_size)
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
        self.gradient_watch = GradientWatch(gradients, self.held_gradients.discard, self._gradients_alone())
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
            recovery=Recovery(groups, step, self.gathers, reductions, interleaving, self.gatherer, self.reducer),
        )
        self.passes = Passes(parts)
        self._reopening = Reopening(groups, parts, self.passes, gradients, reductions)
        self._hooks = ModuleHooks(model, self.units, self.passes, self._calls, unannounced, self.gathers)
        self._interception = Interception(model, self.units, unannounced)
        self._compiled: CompiledRegions | None = None
        zero_grads = watch_modules(model, self.discard_gradients) if self.gradients else []
        self._closing = [zero_grad.remove for zero_grad in zero_grads] + [self.gradient_watch.end]

    @property
    def step(self) -> int:
        """The number of the step under way, which messages and collectives carry."""
        return self._step.value

    @step.setter
    def step(self, number: int) -> None:
        self._step.value = number

    # -- passes ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Start a backward pass; agreed by all ranks when it gathers or reduces."""
        self.passes.begin_backward()

    def end_backward(self) -> None:
        """Finish the backward pass: flush reductions, release units."""
        self.passes.end_backward()

    def compile(self, model: nn.Module, **options: Any) -> list[str]:
        """torch.compile ``model`` region by region (see `CompiledRegions`); return the regions' names."""
        if self._compiled is not None:
            self._compiled.remove()
        self._compiled = CompiledRegions(model, self.units, self._hooks, **options)
        return self._compiled.names

    def add_use(self, name: str, module: nn.Module, unit: Unit) -> None:
        """Have the calls of ``module`` use ``unit`` too."""
        self._hooks.add_use(name, module, unit)

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Ranks may call forward a different number of times inside (without backward): a rank that is done takes part
        in the others' gathers until all are. Collective."""
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
        """Until `resume`, calls of modules are not followed: for a model that is gathered inside `gathered`."""
        if self.gathers.active:
            raise PartitionError("the hooks were switched off inside a forward or backward pass; do it before or after")
        self._calls.paused = True

    def resume(self) -> None:
        """Follow calls of modules again."""
        self._calls.paused = False

    def close(self) -> None:
        """Remove the hooks; parameters stay as they are."""
        if self._compiled is not None:
            self._compiled.remove()
        self._hooks.remove()
        self._interception.remove()
        for remove in self._closing:
            remove()

    def watch_units(self, watch: UnitWatch) -> None:
        """Tell ``watch`` when units compute, from now on."""
        self._watched_units.watch = watch

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Have ``optimizer.zero_grad`` forget all gradients."""
        self.on_close(ZeroGrad(optimizer, self.discard_gradients).remove)

    def discard_gradients(self, parameters: Iterable[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Forget the gradients of ``parameters`` (None: of all) since the last step; `reopen` first."""
        self.reopen("zero_grad")
        self.held_gradients.discard(parameters, set_to_none=set_to_none)

    def on_close(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` when the runtime is closed."""
        self._closing.append(remove)

    # -- the other ranks ---------------------------------------------------------------------------------------------

    def agree(self, kind: str, name: str, payload: Any) -> list[Any]:
        """Meet the other ranks at ``kind``/``name``; return their payloads (plain data) in rank order."""
        return self._agreement.agree(kind, name, payload)

    def shard_changed(self, unit: Unit) -> None:
        """This rank alone has written other weights into its shard; all ranks learn it when they next agree."""
        self._agreement.note_changed(unit)

    def _serve_others(self) -> None:
        """Join the forward passes of ranks that are not done, without computing anything."""
        while (running := self._agreement.meet_done()) is not None:
            self.gatherer.begin(forward_key(running))
            self.gatherer.end(joined=True)

    # -- failures ----------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Return whether an earlier failure has ended this runtime."""
        return self._liveness.failed

    def check_alive(self) -> None:
        """Raise `CommError` when an earlier failure has ended this runtime."""
        self._liveness.check()

    def reopen(self, call: str) -> None:
        """After a failure that has ended this runtime, on every rank: go on with the weights before the step (see
        `Reopening`). Returns at once without one. Raises `CommError` where that cannot be."""
        self._reopening.reopen(call)

    def writing(self, what: str) -> AbstractContextManager[None]:
        """Around all that writes shards, masters or states: after its interruption `reopen` is refused."""
        return self._liveness.writing(what)

    def abort(self, failure: BaseException) -> None:
        """This rank cannot go on: tell the others why and leave the data groups, so that nobody waits for it."""
        self._liveness.end(failure)

    def failed_in(self, call: str, failure: BaseException, *, awaited: bool = False) -> bool:
        """Make the next pass possible after ``failure`` in ``call``, else `abort`; return whether the engine goes on
        (see `Passes.failed_in`)."""
        return self.passes.failed_in(call, failure, awaited=awaited)

    def refuse_torn(self, call: str) -> None:
        """Raise `PartitionError` where the gradients hold a part of a backward pass that failed."""
        self.held_gradients.refuse_torn(call)

    def _gradients_alone(self) -> dict[str, nn.Parameter]:
        """Parameters whose gradients differ between ranks: they require some, but no optimizer has them."""
        if self.groups.control.world_size == 1:
            return {}
        untrained = [u for u in self.units if not u.plan.trainable]
        return {n: p for u in untrained for n, p in zip(u.names, u.parameters, strict=True) if p.requires_grad}
