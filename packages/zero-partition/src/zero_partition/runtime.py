"""The passes of one partitioned model: forward and backward hooks, gathers, reductions, agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_comm import CommError, EngineGroups

from .compilation import CompiledRegions
from .errors import PartitionError, ReleasedParameterError
from .gatherer import Gatherer
from .gradient_hook import GradientHook
from .gradient_watch import GradientWatch
from .gradients import UnitGradients
from .hooks import ModuleHooks, SavedViews, wraps_tensors
from .interception import Interception
from .pace import Pace
from .passes import Agreement, EndOfBackward
from .recovery import Recovery, advise
from .reducer import Reducer
from .released_use import ReleasedUse
from .residency import Residency
from .unit import Unit, UnitState
from .unit_watch import UnitWatch
from .user_edits import UserEdits
from .user_gradients import UserGradients
from .zeroing import ZeroGrad, watch_modules

_BACKWARD = "backward"
_STEP = "step"
_DONE = "done in synced()"


class Runtime:
    """Runs a partitioned model's passes; made by `partition`.

    A forward pass is the call of the outermost hooked module; a backward pass lasts from `begin_backward` to
    `end_backward`, or, when the user calls ``loss.backward()``, from the first gradient to the end of autograd's run.
    Passes of sharded parameters, and backward passes that reduce, are agreed by all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        gradients: Sequence[UnitGradients],
        groups: EngineGroups,
        residency: Residency,
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
        self.step = 0
        self.reduces_now: Callable[[], bool] = lambda: True
        self.allows_plain_backward: Callable[[], str | None] = lambda: None
        self.unit_watch: UnitWatch | None = None
        self.edits = UserEdits(self.units, groups.control.world_size)
        self.agreement = Agreement(groups.control, self._serve_request)
        self.gatherer = Gatherer(
            self.units,
            self._request,
            prefetch_numel=prefetch_numel,
            max_live_numel=max_live_numel,
        )
        self.gatherer.soon = lambda units: residency.prefetch([u.name for u in units])
        self.reducer = Reducer(list(gradients), device, bucket_numel=bucket_numel, complete=complete)
        self.reducer.used = lambda: self.gatherer.used
        self.user_gradients = UserGradients(gradients)
        self.gradient_watch = GradientWatch(gradients, self.discard_gradients, self._gradients_alone())
        self._pace = Pace(self.gatherer, self.reducer, lambda need: self.agree("learning", "", need))
        self._recovery = Recovery(groups, self.gatherer, self.reducer, self._pace)
        self._sharded = any(u.releasable for u in self.units)
        self._saved = SavedViews(self)
        self._in_backward = False
        self._left: list[tuple[Unit, int, GradientHook]] = []
        self._depth: dict[int, int] = {}
        self._members_run: dict[int, set[str]] = {}
        self._keepers: dict[int, set[str]] = {}
        self._outermost: str | None = None
        self._last_forward: str | None = None
        self._trains = False
        self._failure: str | None = None
        self._synced = False
        self._paused = False
        self._changed: set[int] = set()
        self._storages: dict[int, Unit] = {}
        self._frozen = [
            (n, p) for u in self.units for n, p in zip(u.names, u.parameters, strict=True) if not p.requires_grad
        ]
        self._unit_of = {id(p): u for u in self.units if u.releasable for p in u.parameters}
        self.released_use = ReleasedUse(self._unit_of, self.gatherer, self._bring, alone=groups.control.world_size == 1)
        self._hooks = ModuleHooks(model, self.units, self)
        self._interception = Interception(model, self.units, self)
        self._compiled: CompiledRegions | None = None
        zero_grads = watch_modules(model, self.discard_gradients) if self.gradients else []
        self._closing = [zero_grad.remove for zero_grad in zero_grads] + [self.gradient_watch.end]

    # -- the user's backward and the engine's ------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Start a backward pass; agreed by all ranks when it gathers or reduces."""
        self.check_alive()
        self.groups.control.goes_on()
        if self._synced:
            raise PartitionError(
                "backward was called inside synced(), where ranks may do different things; leave it first"
            )
        self.refuse_torn("backward")
        self.gradient_watch.end()
        self.user_gradients.take()
        self.hide_gradients()
        reduces = self.reduces_now()
        self._in_backward = True
        if self._sharded or reduces:
            payload = {"units": self.reducer.pending() if reduces else [], "reduces": reduces}
            answers = self.agree(_BACKWARD, "", payload)
            if self._sharded:
                self.gatherer.step = self.step
                self.gatherer.begin(_BACKWARD, like_reversed=self._last_forward)
                if reduces:
                    self._pace.begin()
            if reduces:
                self.reducer.step = self.step
                self.reducer.begin({unit for answer in answers for unit in answer["units"]})

    def end_backward(self) -> None:
        """Finish the backward pass: flush reductions, release units."""
        if not self._in_backward:
            return
        self.check_alive()  # a pass that ended the engine leaves reductions that nobody answers
        self._take_left()
        self.reducer.start_rest()
        self._pace.end()
        self.gatherer.end()
        self.reducer.finish()
        self.reducer.refuse_late()
        self._pace.stop()
        self._in_backward = False
        shown = self.reduces_now()
        if shown:
            self.show_gradients()
        self.gradient_watch.begin(shown=shown)

    def show_gradients(self) -> None:
        """Where every rank keeps whole averaged gradients (stage 0): make them the parameters' ``.grad``."""
        works = [work for g in self.gradients.values() if (work := g.gather_whole(self.step)) is not None]
        for work in works:
            work.wait()
        self.user_gradients.show()

    def hide_gradients(self) -> None:
        """Take the averaged gradients off the parameters again: autograd would add to them in place."""
        self.user_gradients.hide()

    def discard_gradients(self, parameters: Iterable[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Forget the gradients of ``parameters`` (None: of all) since the last step, as ``zero_grad`` does; every rank
        does it at the same point. Raises `PartitionError` inside a backward pass."""
        if self._in_backward:
            raise PartitionError(
                "zero_grad was called inside a backward pass, while gradients are on their way; call it before or after"
            )
        self.user_gradients.discard(parameters, set_to_none=set_to_none)
        if parameters is None:
            self.reducer.torn = None

    def forget_gradients(self) -> None:
        """A step is over: there are no gradients before the next backward pass."""
        self.reducer.clear()
        self.user_gradients.forget()

    def flush(self) -> None:
        """Reduce gradients that came after their unit's turn, on any rank; all ranks call it at the same point."""
        self.user_gradients.take()
        self.reduce_late({unit for answer in self.agree("flush", "", self.reducer.unreduced()) for unit in answer})

    def reduce_late(self, units: set[int]) -> None:
        """Reduce ``units`` (the same on every rank) outside a backward pass."""
        if units:
            self.reducer.step = self.step
            self.reducer.reduce_now(units)
            self.show_gradients()

    def agree(self, kind: str, name: str, payload: Any) -> list[Any]:
        """Meet the other ranks; carries what was learned about orders along. Returns the payloads in rank order."""
        self.check_alive()
        if not self.gatherer.active:
            self.released_use.release()
        message = self._with_news(payload, kind)
        return self._learn(self.agreement.start(kind, name, self.step, message, self._beside()), kind)

    def _with_news(self, payload: Any, kind: str) -> list[Any]:
        """``payload`` and what else the other ranks have to know now."""
        news = self.gatherer.take_news() if self._sharded else {}
        edits = self.edits.report(kind, in_pass=self.gatherer.active)
        return [payload, news, self.reducer.observed(), self._take_changed(), edits, self.user_gradients.discards]

    def _learn(self, answers: list[Any], kind: str) -> list[Any]:
        if any(answer[1] for answer in answers):
            self.gatherer.learn([answer[1] for answer in answers])
        if any(answer[2] for answer in answers):
            self.reducer.learn([answer[2] for answer in answers])
        for index in {index for answer in answers for index in answer[3]}:
            self.units[index].route.weights_changed()
        self.edits.settle([answer[4] for answer in answers], kind)
        self._check_discards([answer[5] for answer in answers])
        return [answer[0] for answer in answers]

    def _check_discards(self, discards: Sequence[int]) -> None:
        apart = next((rank for rank, other in enumerate(discards) if other != discards[0]), None)
        if apart is not None:
            did, did_not = (0, apart) if discards[0] else (apart, 0)
            how = "of other parameters" if discards[did_not] else "not"
            raise PartitionError(
                f"rank {did} discarded gradients that were averaged already (zero_grad) and rank {did_not} did {how}: "
                "each rank would be left with a part. Call zero_grad on every rank at the same point. The weights were "
                "not changed."
            )

    def shard_changed(self, unit: Unit) -> None:
        """This rank alone has written other weights into its shard; all ranks learn it when they next agree."""
        self._changed.add(unit.index)

    def _take_changed(self) -> list[int]:
        changed, self._changed = sorted(self._changed), set()
        return changed

    def failed_in(self, call: str, failure: BaseException, *, awaited: bool = False) -> bool:
        """Make the next pass possible after ``failure`` in ``call`` where no other rank can be waiting for this one,
        else `abort`; return whether the engine goes on.

        ``awaited``: others wait for this rank though no pass is open. May be called again."""
        if self._failure is not None:
            return False
        in_backward = self._in_backward
        try:
            goes_on = self._recovery.leave_pass(call, self.step, failure, awaited=awaited)
        except Exception as second:  # out of memory again, a tier that fails: the first cause is what counts
            self.abort(failure)
            raise failure from second
        if not goes_on:
            self.abort(failure)
            return False
        self._in_backward = False
        for unit, index, _ in self._left:
            unit.parameters[index].grad = None
        self._left.clear()
        if in_backward or call == _STEP:
            self.reducer.torn = f"{type(failure).__name__}: {failure}"
        self._saved.close()
        self._outermost = None
        self._depth.clear()
        self._members_run.clear()
        self._hooks.forget_calls()
        self.groups.control.failed(f"{type(failure).__name__}: {failure} (in {call} of step {self.step})")
        advise(failure, torn=self.reducer.torn is not None)
        return True

    def refuse_torn(self, call: str) -> None:
        """Raise `PartitionError` where the gradients hold a part of a backward pass that failed."""
        if self.reducer.torn is not None:
            raise PartitionError(
                f"{call}: an earlier backward pass failed ({self.reducer.torn}) and has left a part of its gradients; "
                "call engine.zero_grad() before the next backward or step"
            )

    def abort(self, failure: BaseException) -> None:
        """This rank cannot go on: tell the others why and leave the data groups, so that nobody waits for it."""
        if self._failure is None:
            self._failure = f"{type(failure).__name__}: {failure}"
            self.groups.abort(failure, when=f" (in step {self.step})")

    def check_alive(self) -> None:
        """Raise when an earlier failure has ended this runtime."""
        if self._failure is not None:
            here = (
                "What this rank has of the weights is its shards, which cannot be gathered any more."
                if self._sharded
                else "The model's parameters are whole on this rank: torch.save(model.state_dict()) writes them."
            )
            raise CommError(
                f"this engine has failed earlier and cannot go on: {self._failure}. {here} Make a new engine on every "
                "rank and load a checkpoint."
            )

    @property
    def failed(self) -> bool:
        """Whether an earlier failure has ended this runtime."""
        return self._failure is not None

    def compile(self, model: nn.Module, **options: Any) -> list[str]:
        """torch.compile ``model`` region by region (see `CompiledRegions`); return the regions' names."""
        if self._compiled is not None:
            self._compiled.remove()
        self._compiled = CompiledRegions(model, self.units, self._hooks, self, **options)
        return self._compiled.names

    def add_use(self, name: str, module: nn.Module, unit: Unit) -> None:
        """Have the calls of ``module`` use ``unit`` too."""
        self._hooks.add_use(name, module, unit)

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Ranks may call forward a different number of times inside (without backward): a rank that is done takes part
        in the others' gathers until all are. Collective."""
        if self._synced:
            raise PartitionError("synced() is open already")
        self._synced = True
        try:
            yield
            if self._sharded:
                self._serve_others()
        finally:
            self._synced = False

    def pause(self) -> None:
        """Until `resume`, calls of modules are not followed: for a model that is whole inside `gathered`."""
        if self.gatherer.active:
            raise PartitionError("the hooks were switched off inside a forward or backward pass; do it before or after")
        self._paused = True

    def resume(self) -> None:
        """Follow calls of modules again."""
        self._paused = False

    def close(self) -> None:
        """Remove the hooks; parameters stay as they are."""
        if self._compiled is not None:
            self._compiled.remove()
        self._hooks.remove()
        self._interception.remove()
        for remove in self._closing:
            remove()

    def watch_optimizer(self, optimizer: Optimizer) -> None:
        """Have ``optimizer.zero_grad`` forget all gradients."""
        self.on_close(ZeroGrad(optimizer, self.discard_gradients).remove)

    def on_close(self, remove: Callable[[], None]) -> None:
        """Call ``remove`` when the runtime is closed."""
        self._closing.append(remove)

    # -- what the hooks report ---------------------------------------------------------------------------------------

    def enter_module(self, name: str, units: list[Unit]) -> bool:
        """A hooked module's forward begins; returns whether it is a part of a pass.

        What torch.func's transforms (`grad`, `jvp`, …) compute is none: their derivatives concern no parameter's
        ``.grad``, and tensors that are made inside have no memory to send. They need the parameters whole.
        """
        if self._paused:
            return False
        if self._outermost is None:
            if wraps_tensors():
                self._check_present()
                return False
            self._outermost = name
            self.groups.control.goes_on()
            self._trains = torch.is_grad_enabled()
            self._check_frozen()
            self._begin_forward(name)
        for unit in units:
            if self._trains:
                self.reducer.mark_ran(unit.index)
            if unit.releasable:
                self.gatherer.need(unit)
                self._note_present(unit)
                self._depth[unit.index] = self._depth.get(unit.index, 0) + 1
        if self.unit_watch is not None and not self._in_backward:
            self.unit_watch.enters(units)
        return True

    def exit_module(self, name: str, units: list[Unit], aliased: list[Unit], failure: BaseException | None) -> None:
        """A hooked module's forward is over."""
        if self._paused:
            return
        if self.unit_watch is not None and not self._in_backward:
            self.unit_watch.leaves(units)
        for unit in aliased:
            unit.lent = True
        for unit in units:
            if not unit.releasable:
                continue
            depth = self._depth.get(unit.index, 0) - 1
            self._depth[unit.index] = max(depth, 0)
            run = self._members_run.setdefault(unit.index, set())
            run.add(name)
            if depth <= 0 and not self._in_backward:
                if all(member in run for member in (*unit.plan.members, *self._keepers.get(unit.index, ()))):
                    self.gatherer.leave(unit)
        if name == self._outermost:
            self._outermost = None
            self._end_forward(failure)

    def parameter_returned(self, name: str, parameter: nn.Parameter) -> None:
        """A module gives a parameter to its caller: the unit stays until the module around it is done."""
        unit = self._unit_of.get(id(parameter))
        if unit is not None and name:
            self._keepers.setdefault(unit.index, set()).add(self._hooks.keep_around(name, unit))

    def keeper_done(self, name: str, units: list[Unit]) -> None:
        """A module whose submodules return parameters of ``units`` is done; it may return them again."""
        for unit in units:
            run = self._members_run.setdefault(unit.index, set())
            run.add(name)
            idle = self._depth.get(unit.index, 0) <= 0 and not self._in_backward
            if idle and all(member in run for member in (*unit.plan.members, *self._keepers[unit.index])):
                self.gatherer.leave(unit)

    def before_backward(self, units: list[Unit]) -> None:
        """Backward is about to read the units' parameters."""
        if not self._in_backward:
            self._begin_plain_backward()
        for unit in units:
            if unit.releasable:
                self.gatherer.need(unit)
                self._note_present(unit)
                if torch.is_grad_enabled():  # create_graph: the new graph saves views, and nothing brings those back
                    unit.lent = True
                self.gatherer.leave_before(unit, self._idle_in_backward)

    def gradient_ready(self, unit: Unit, index: int, hook: GradientHook) -> None:
        """Autograd has finished a parameter."""
        if self._left:
            self._take_left()
        parameter = unit.parameters[index]
        if not self._in_backward:
            gradient, parameter.grad = parameter.grad, None
            self._begin_plain_backward()
            parameter.grad = gradient
        if hook.goes_on:
            self._left.append((unit, index, hook))
        else:
            self._take_gradient(unit, index, hook)

    def _take_left(self) -> None:
        """Take the gradients that are left where autograd and the user's hooks have put them."""
        left, self._left = self._left, []
        for unit, index, hook in left:
            self._take_gradient(unit, index, hook)

    def _take_gradient(self, unit: Unit, index: int, hook: GradientHook) -> None:
        parameter = unit.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if hook.changed(gradient) and self.gradients[unit.index].touched[index]:
            raise PartitionError(
                f"a post-accumulate-grad hook changed the gradient of parameter '{unit.names[index]}' after the first "
                "backward pass since the last step. In torch it sees the sum of the passes, here each pass's alone. "
                "Use parameter.register_hook, which sees each pass's alone in torch too, or one backward pass a step. "
                "Weights were not changed; call engine.zero_grad() before you go on."
            )
        if gradient is None:
            return
        if gradient.requires_grad:
            refusal = PartitionError(
                f"backward(create_graph=True) reached parameter '{unit.names[index]}', but the engine takes gradients "
                "as numbers and leaves no .grad to go on from. Use torch.autograd.grad(..., create_graph=True), and "
                "give the loss that contains its result to engine.backward."
            )
            self.abort(refusal)
            raise refusal
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        self.gradients[unit.index].add(index, gradient, more_follow=not self.reducer.active)
        if self.reducer.active and self.reducer.arrived(unit.index):
            if self.unit_watch is not None:
                self.unit_watch.backward_done(unit)
            self.gatherer.leave(unit)

    def parameter_read(self, parameter: nn.Parameter) -> None:
        """Code asked a module for a parameter; bring it when a pass of this engine runs on this rank."""
        unit = self._unit_of.get(id(parameter))
        if unit is None or not self.gatherer.active or self.gatherer.has(unit):
            return
        self._bring(unit)

    def refuse_pickle(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise when one of the parameters is released: what would be written down is NaN."""
        for parameter in parameters:
            unit = self._unit_of.get(id(parameter))
            if unit is not None and unit.state is not UnitState.GATHERED:
                name = next(n for n, p in zip(unit.names, unit.parameters, strict=True) if p is parameter)
                raise ReleasedParameterError(
                    f"parameter '{name}' is released, and a pickle of its module would hold NaN. Write it inside "
                    "`engine.gathered(list(model.parameters()))`, or use engine.consolidated_state_dict()."
                )

    def unit_of_storage(self, address: int) -> Unit | None:
        """The gathered unit whose flat buffer lives at ``address``."""
        unit = self._storages.get(address)
        return unit if unit is not None and unit.holds_storage(address) else None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _bring(self, unit: Unit) -> None:
        self.check_alive()
        self.gatherer.step = self.step
        self.gatherer.need(unit)
        self._note_present(unit)

    def _beside(self) -> str | None:
        return _DONE if self._synced else None

    def _serve_others(self) -> None:
        """Join the forward passes of ranks that are not done, without computing anything."""
        while True:
            self.check_alive()
            others = self.agreement.meet(_DONE, self.step, self._with_news(None, _DONE))
            self._learn([message.payload for message in others], _DONE)
            running = [message for message in others if message.kind != _DONE]
            if not running:
                return
            self.gatherer.step = self.step
            self.gatherer.begin(_forward_key(running[0].name))
            self.gatherer.end(joined=True)

    def _check_present(self) -> None:
        absent = next((u for u in self.units if u.releasable and not self.gatherer.pinned(u)), None)
        if absent is not None:
            raise PartitionError(
                "the model was called inside a transform of torch.func (grad, vjp, jacrev, hessian, jvp, …), where "
                f"sharded parameters such as '{absent.names[0]}' cannot be gathered. Open "
                "engine.gathered(model.parameters()) around the transform, or use torch.autograd.grad."
            )

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise PartitionError(
                    f"parameter '{name}' was frozen when the engine was made and requires gradients now: it has no "
                    "master, no gradient buffer and no optimizer state. Call destroy() and initialize again."
                )

    def values_loaded(self, units: list[Unit]) -> None:
        """``load_state_dict`` has written parameters: masters and shards follow."""
        for unit in units:
            if not unit.releasable:
                unit.write_back()

    def _note_present(self, unit: Unit) -> None:
        self._storages[unit.flat.untyped_storage().data_ptr()] = unit
        if self._trains:
            self.reducer.mark_ran(unit.index)

    def _begin_forward(self, name: str) -> None:
        if self._in_backward:
            return
        self.gradient_watch.pause()
        self.user_gradients.take()
        if self._trains:
            self.hide_gradients()
        key = _forward_key(name)
        self.edits.forward_begins(key)
        if not self._sharded:
            return
        self.check_alive()
        self._members_run.clear()
        self._depth.clear()
        self.agree("forward", name, None)
        self.gatherer.step = self.step
        self.gatherer.begin(key)
        self._last_forward = key
        if self._trains:
            self._saved.open()

    def _end_forward(self, failure: BaseException | None) -> None:
        if self._in_backward:
            return
        self.edits.forward_ends()
        self.gradient_watch.resume(hidden=self._trains)
        if not self._sharded:
            return
        self._saved.close()
        if failure is not None:
            self.failed_in("forward", failure)
            return
        self.gatherer.end()
        if self._trains:
            self.released_use.forward_ended()

    def _begin_plain_backward(self) -> None:
        refusal = self.allows_plain_backward()
        if refusal is not None:
            raise RuntimeError(refusal)
        self.begin_backward()
        end = EndOfBackward(self.end_backward, self._leave_failed_backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _leave_failed_backward(self) -> None:
        """``loss.backward()`` has raised: end the pass, or tell the other ranks where they may wait for this one."""
        if self._in_backward and self._failure is None:
            cause = "loss.backward() raised on this rank before its gradients were complete"
            self.failed_in(_BACKWARD, PartitionError(cause))

    def _gradients_alone(self) -> dict[str, nn.Parameter]:
        """Parameters whose gradients differ between ranks: they require some, but no optimizer has them."""
        if self.groups.control.world_size == 1:
            return {}
        untrained = [u for u in self.units if not u.plan.trainable]
        return {n: p for u in untrained for n, p in zip(u.names, u.parameters, strict=True) if p.requires_grad}

    def _idle_in_backward(self, unit: Unit) -> bool:
        """Frozen units have no gradient that says when backward is done with them; those with one member go by the
        order."""
        return not unit.plan.trainable and len(unit.plan.members) == 1 and self._depth.get(unit.index, 0) == 0

    def _request(self, unit: int) -> None:
        self.agreement.request(unit, self.step)

    def _serve_request(self, unit: int, mine: bool) -> None:
        self.gatherer.serve(unit, mine)


def _forward_key(name: str) -> str:
    return f"forward of {name or 'the model'}"
