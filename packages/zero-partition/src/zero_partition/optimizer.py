"""Wrap a torch optimizer so that it updates only this rank's fragments, and run its steps on all ranks together.

Virtual ranks make results the same at any number of ranks ([Note: virtual ranks] in leaves.py). A step pre-hook or
post-hook is one of torch's hooks around `Optimizer.step`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_precision import LossScale, NoLossScale

from .agreed_gradients import AgreedGradients, GradientAgreement
from .device_guard import DeviceGuard
from .errors import NonFiniteGradientError, PartitionError
from .groups import AddParamGroup, check_groups
from .model_parts import ModelParts, UnsplitModel
from .needs import AveragingOptimizer, Need, NormOptimizer, check_repeats, need_of, refuse_unusable
from .norm import GridSquares, NormSquared, grid_squares, norm_squared
from .optimizer_states import ListedParameter, OptimizerStates, moved_state, number_device, sharded_state
from .optimizer_tensors import OptimizerTensors, left_by_an_engine
from .partition import Partition
from .planning import update_dtype
from .step_result import StepResult, norm_of
from .updates import Factor, FragmentUpdate, OwnedFragment, Touched, connect_norms, connect_positions, update_for

_ANEW = (
    "Build a new optimizer over the model's parameters. To keep its states, save a checkpoint before engine.destroy() "
    "and load it into the new engine."
)


class ShardedOptimizer:
    """Wraps any ``torch.optim.Optimizer`` built over the model's parameters.

    The optimizer object stays the user's: its param groups keep their dicts and hyperparameters, and only their
    ``params`` are replaced, for good, by the tensors that this rank updates. So schedulers and ``group["lr"] = …``
    work. An elementwise optimizer gets this rank's fragment of each parameter; one that needs full parameters (Muon,
    Adafactor) gets the full parameters that are assigned to this rank. In both cases a tensor that this rank updates is
    called a fragment here.

    ``partition``: the sharded model. ``clip``: maximal global norm, 0 for off. ``loss_scale``: the scale in the
    gradients, None for none. ``skip_non_finite``: skip the step instead of raising if the norm is not finite and there
    is no loss scale. ``norm``, ``squares``: compute sums of squares for the norm, the latter under virtual ranks.
    ``parts``: the relation of this rank's model to the full one under tensor parallelism, None without.

    Raises `PartitionError`, naming the cause, for foreign or duplicate parameters and for an optimizer that would
    compute something else on shards than on the full model.

    Attributes:
        inner: the wrapped optimizer.
        fragments: the parts of parameters that this rank updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        partition: Partition,
        *,
        clip: float = 0.0,
        loss_scale: LossScale | None = None,
        skip_non_finite: bool = False,
        norm: NormSquared = norm_squared,
        squares: GridSquares = grid_squares,
        parts: ModelParts | None = None,
    ) -> None:
        refuse_unusable(optimizer)
        self.inner = optimizer
        self.clip = clip
        self.loss_scale: LossScale = loss_scale if loss_scale is not None else NoLossScale()
        self._partition = partition
        self._skip_non_finite = skip_non_finite
        self._parts: ModelParts = parts if parts is not None else UnsplitModel()
        self.fragments: list[OwnedFragment] = []
        self._listed: list[list[ListedParameter]] = []
        self._places: dict[str, tuple[int, int]] = {}  # of listed parameters: the unit's index, the position in it
        self._stepping = False
        own_hook = optimizer.register_step_pre_hook(self._refuse_direct_step)
        self._update = update_for(optimizer, partition, full=_needs_full_parameters(optimizer, partition, self._parts))
        self._exchange_parameters(optimizer)
        connect_norms(optimizer, partition, self.fragments)
        connect_positions(optimizer, partition, self.fragments)
        if isinstance(optimizer, AveragingOptimizer):
            optimizer.connect(partition.groups.gather)
            for gradients in partition.runtime.gradients.values():
                gradients.set_averaging_optimizer(optimizer)
        self._states = OptimizerStates(
            optimizer,
            self._listed,
            partition.states,
            self._name_in_model,
            partition.readers.wait,
            partition.groups.control.leave_note,
        )
        self._tensors = self._guard_tensors(own_hook)
        self._guard = DeviceGuard(optimizer, self._tensors, self._update, partition.device)
        self._gradients = GradientAgreement(
            optimizer, self._tensors, self._places, partition, self._parts, norm=norm, squares=squares
        )
        partition.runtime.watch_optimizer(optimizer)
        partition.runtime.on_close(self._states.restore_plain_state)
        partition.runtime.on_close(AddParamGroup(optimizer, partition).remove)
        partition.set_optimizer(self)
        self._announce_scale()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own param groups."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def group_names(self) -> list[list[str]]:
        """The names of the model's parameters in each param group, in its order; those of no unit are left out."""
        return [[one.name for one in listed if one.name in self._places] for listed in self._listed]

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by tensor of its param groups; a `TierStates` if a tier keeps it."""
        return self.inner.state

    def state_of(self, owned: OwnedFragment) -> Mapping[str, Any]:
        """Return the state, by kind, of the fragment ``owned`` that the wrapped optimizer itself holds; empty without
        one, or if a tier keeps the states."""
        return self._states.state_of(owned)

    def replace_state(self, owned: OwnedFragment, state: dict[str, Any] | None) -> None:
        """Set the state of the fragment ``owned`` that the wrapped optimizer, not a tier, holds to ``state``; None
        removes it. On an accelerator the host waits for the norm of the next step."""
        self._states.replace_state(owned, state)
        self._guard.forget()

    def number_devices(self) -> dict[str, torch.device]:
        """Return, by name of each parameter with a fragment on this rank, the device of the numbers in its state, as
        ``step``; see `number_device`."""
        listed = zip(self.inner.param_groups, self._listed, strict=True)
        return {p.name: number_device(group, p.owned) for group, all_ in listed for p in all_ if p.owned is not None}

    def step(self) -> StepResult:
        """End a running backward pass, agree with all ranks on the gradients and their norm, clip, update the weights
        and publish them; return the norm and whether the step was taken. Collective.

        If the norm is not finite, the step is skipped where there is a loss scale or ``skip_non_finite``; else
        `NonFiniteGradientError`, which names the first parameter, is raised on every rank. On an accelerator the next
        step may be the one that raises ([Note: norms on accelerators] in agreed_gradients.py). The gradients are
        forgotten in each of these cases. Raises `PartitionError`, before any weight changes, if param groups, states or
        gradients are not as a step needs them: changed by user code, or different on the ranks.
        """
        runtime = self._partition.runtime
        self._partition.arrivals.wait()
        runtime.held_gradients.refuse_torn("step")
        check_groups(self.inner, self._listed)
        self._states.install_mapping()
        self._tensors.check_states()
        runtime.end_backward()
        runtime.weight_passes.end("the optimizer has stepped")
        runtime.gradient_watch.end()
        runtime.released_use.step_begins()
        self._gradients.refuse_incomplete()
        is_fatal = isinstance(self.loss_scale, NoLossScale) and not self._skip_non_finite
        agreed = self._gradients.agree(defers=is_fatal and self._guard.is_able, covers=self._guard.covers)
        runtime.hints.stepped(runtime.step, agreed.touched)
        runtime.held_gradients.hide()
        scale = self.loss_scale.scale
        if agreed.square is None and agreed.on_device is not None:
            raised = self._update_weights(agreed, agreed.factor(self.clip, scale))
            runtime.held_gradients.forget()
            return StepResult(agreed.on_device, scale, raised)
        square = math.nan if agreed.square is None else agreed.square
        finite = math.isfinite(square)
        if not finite:
            self._partition.refuse_placeholder_buffers()
        if not finite and is_fatal:
            runtime.held_gradients.forget()
            found = f"the first gradient that is not finite belongs to parameter '{agreed.culprit}'"
            if not agreed.culprit:
                found = "every gradient is finite, but the sum of their squares is not, in float64"
            raise NonFiniteGradientError(
                f"the gradient norm of step {runtime.step} is {norm_of(square, scale)}: {found}. The weights were not "
                "changed. Check the loss and the data of this step, lower the learning rate, or set "
                "bf16.check_grad_overflow to true to skip such steps."
            )
        raised = self._update_weights(agreed, agreed.factor(self.clip, scale)) if finite else None
        self.loss_scale.update(not finite)  # after the update, whose gradients have the scale from before
        self._announce_scale()
        runtime.held_gradients.forget()
        return StepResult(square, scale, raised)

    def _announce_scale(self) -> None:
        """Tell the tier, if there is one, the factor by which it multiplies the next step's gradients unless that step
        clips: one over the loss scale."""
        if self._partition.states is not None:
            self._partition.states.expect(1.0 / self.loss_scale.scale)

    def learn_deferred(self) -> None:
        """Wait until the host knows the norm of the last step, as something is about to depend on it.

        Every rank calls it at the same point. Raises as `GradientAgreement.learn_deferred` does.
        """
        self._gradients.learn_deferred()

    def _update_weights(self, agreed: AgreedGradients, factor: Factor) -> Exception | None:
        """Wait for readers of the weights, update the weights with gradients times ``factor``, and publish them. Return
        the exception of a step post-hook of the user's, None without one. Collective. ``agreed``: what the ranks know
        of the gradients.

        A pre-hook that raises on any rank ends the step on all, before anything is written. Version counters of the
        updated parameters grow.
        """
        runtime = self._partition.runtime
        raised: list[Exception | None] = []
        self._partition.readers.wait()
        with contextlib.ExitStack() as writing:

            def step(begin: Callable[[], None] | None = None) -> None:
                """Run the optimizer's step with its hooks, and ``begin``, if given, before its arithmetic; append a
                post-hook's exception, or None, to ``raised``. Collective where some rank has pre-hooks."""

                def begin_writing() -> None:
                    """Meet the other ranks if any has pre-hooks, so that all pre-hooks have run (collective then), mark
                    that weights are being written, and call ``begin`` if it is given."""
                    if agreed.hooked:
                        runtime.agree("step hooks", "", None)
                    writing.enter_context(runtime.writing("the step"))
                    if begin is not None:
                        begin()

                raised.append(self._step_inner(begin_writing, agreed.touched))

            deferred = agreed.on_device if agreed.square is None else None
            with self._tensors.unguarded(), self._guard.skipping(deferred):
                self._update.run(agreed.touched, factor, step)
            self._partition.publish()
        self._guard.note_step(agreed.touched)
        for index, flags in agreed.touched.items():
            self._partition.units[index].edits.bump_versions(flags)
        return raised[0]

    def synchronise(self) -> bool:
        """Make weights equal on all ranks if the optimizer let ranks take steps alone; return whether weights were
        changed. Collective."""
        if not isinstance(self.inner, AveragingOptimizer):
            return False
        with self._tensors.unguarded():
            return self.inner.synchronise()

    def gradient_norm(self) -> float:
        """Return the global norm of the unscaled gradients since the last step; inf or NaN if it is not finite.
        Collective; first takes gradients that user code wrote and reduces late ones.

        If ranks keep their own gradients (`AveragingOptimizer`), it is the root mean square of the ranks' norms, an
        upper bound of the norm of their average.
        """
        square = self._gradients.agree().square
        return math.nan if square is None else norm_of(square, self.loss_scale.scale)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients, and those that ``.grad`` shows, by ``factor``, the same on every rank, for
        clipping outside the step; unreduced gradients are left alone. Sends nothing."""
        for gradients in self._partition.runtime.gradients.values():
            if gradients.is_reduced:
                with gradients.averaged(dirty=True) as averaged:
                    averaged.mul_(factor)
        self._partition.runtime.user_gradients.refresh()

    def _step_inner(self, begin: Callable[[], None], touched: Touched) -> Exception | None:
        """Run the wrapped optimizer's step with its hooks, calling ``begin`` before its arithmetic; return the
        exception of a post-hook, None without one. ``touched``: by unit index, for each parameter, whether any rank had
        a gradient."""
        self._stepping = True
        try:
            return self._tensors.step(begin, [] if self._partition.states else list(self._updated_elsewhere(touched)))
        finally:
            self._stepping = False

    def _updated_elsewhere(self, touched: Touched) -> Iterator[nn.Parameter]:
        """Yield the tensors, in the param groups, of parameters that have a gradient on any rank (``touched``, by unit
        index a flag per parameter) but no fragment on this rank."""
        for parameter in chain.from_iterable(self._listed):
            if parameter.owned is None and (place := self._places.get(parameter.name)) is not None:
                index, number = place
                if index in touched and touched[index][number]:
                    yield parameter.tensor

    def _refuse_direct_step(self, *_: Any) -> None:
        """Raise `PartitionError` for a step that the engine did not start: a step pre-hook of the wrapped optimizer. It
        also raises after the engine was destroyed, as the fragments are not the model's any more."""
        if self._stepping:
            return
        tensors = (owned.tensor for owned in self.fragments)
        if (name := next(filter(None, map(left_by_an_engine, tensors)), None)) is not None:
            raise PartitionError(
                f"optimizer.step() after engine.destroy(): it has fragments of parameters, '{name}' for one, which the "
                f"model does not use any more. {_ANEW}"
            )
        raise PartitionError(
            "optimizer.step() was called directly and would do nothing: the engine holds the gradients. "
            "Call engine.step()"
        )

    def _guard_tensors(self, own_hook: RemovableHandle) -> OptimizerTensors:
        """Guard the tensors of the param groups until the engine closes, so that what user code does to them takes
        effect or is refused; return the guard. ``own_hook``: handle of this class's own step pre-hook."""
        partition, runtime = self._partition, self._partition.runtime
        listed = list(chain.from_iterable(self._listed))

        def has_gradient(name: str) -> bool:
            """Return whether parameter ``name`` has a gradient for this step, reduced or not; False if its unit is not
            trained."""
            if (place := self._places.get(name)) is None:
                return False
            index, number = place
            gradients = runtime.gradients.get(index)  # None: all of the unit is frozen
            return (
                gradients is not None
                and gradients.touched[number]
                and (gradients.is_reduced or gradients.has_unreduced)
            )

        tensors = OptimizerTensors(
            self.inner,
            [(parameter.tensor, parameter.name, parameter.shape) for parameter in listed],
            self._states,
            runtime.step_hook_watch,
            own_hook=own_hook,
            values_here=partition.states is None,
            stay=isinstance(self._update, FragmentUpdate),
            split=partition.options.stage >= 1 and partition.world_size > 1,
            has_gradient=has_gradient,
        )
        runtime.on_close(tensors.remove)
        return tensors

    def _name_in_model(self, parameter: nn.Parameter) -> str:
        """Return the name of ``parameter`` if a unit of the partition holds it; "" for any other tensor."""
        found = self._partition.find(parameter)
        return "" if found is None else found[0].names[found[1]]

    def _exchange_parameters(self, optimizer: Optimizer) -> None:
        """Replace the model's parameters in the param groups of ``optimizer`` by this rank's fragments, with their part
        of the states that the optimizer has already, and fill `fragments`. An empty tensor stands for a parameter
        without a fragment here."""
        old_state = dict(optimizer.state)
        optimizer.state.clear()
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            listed = []
            for position, parameter in enumerate(group["params"]):
                name, owned = self._make_fragment(parameter, number, position, seen)
                if owned is not None and parameter in old_state:
                    state = sharded_state(old_state[parameter], name, parameter.shape, owned)
                    optimizer.state[owned.tensor] = moved_state(state, group, owned)
                tensor = self._empty_like(parameter) if owned is None else owned.tensor
                listed.append(ListedParameter(name, parameter.shape, owned, tensor))
            self._listed.append(listed)
            group["params"] = [parameter.tensor for parameter in listed]
            self.fragments.extend(parameter.owned for parameter in listed if parameter.owned is not None)

    def _empty_like(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return an empty tensor that stands in the param groups for ``parameter``, of which this rank has no fragment,
        in the dtype in which fragments of it are updated."""
        found = self._partition.find(parameter)
        dtype = parameter.dtype if found is None else update_dtype(found[0].plan, self._partition.options.policy)
        empty = torch.empty(0, dtype=dtype, device=self._partition.device)
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def _make_fragment(
        self, parameter: nn.Parameter, group: int, position: int, seen: set[int]
    ) -> tuple[str, OwnedFragment | None]:
        """Return the name of ``parameter``, which stands at ``position`` in the param group ``group`` (an index), and
        this rank's fragment of it; None for no fragment. A frozen or empty parameter of no unit is named by its place.

        ``seen``: the `id` of each parameter before it, to which its own is added. Raises `PartitionError` for a
        duplicate or foreign parameter.
        """
        where = f"param_groups[{group}]['params'][{position}]"
        if id(parameter) in seen:
            raise PartitionError(
                f"{where} (shape {tuple(parameter.shape)}) is in the optimizer twice; list every parameter once"
            )
        seen.add(id(parameter))
        found = self._partition.find(parameter)
        if found is None:
            if not parameter.requires_grad or parameter.numel() == 0:
                return where, None
            if (name := left_by_an_engine(parameter)) is not None:
                raise PartitionError(
                    f"{where} is a fragment of parameter '{name}', with which an engine stepped that is destroyed. "
                    f"{_ANEW}"
                )
            raise PartitionError(
                f"{where} (shape {tuple(parameter.shape)}) does not belong to the model given to initialize; "
                "build the optimizer over that model's parameters"
            )
        unit, index = found
        self._places[unit.names[index]] = unit.index, index
        return unit.names[index], self._update.make_fragment(unit, index)


def _needs_full_parameters(optimizer: Optimizer, partition: Partition, parts: ModelParts) -> bool:
    """Return whether ``optimizer`` has to get full parameters. At stage 0 every one gets them, without a look at it, if
    there are no virtual ranks and ``parts`` (tensor parallelism) splits no parameter.

    Raises `PartitionError` for an optimizer that would compute something else on a part of the model than on the full
    one.
    """
    split = [
        n
        for unit in partition.units
        for n, p in zip(unit.names, unit.parameters, strict=True)
        if parts.holds_part_of(p)
    ]
    if partition.options.stage == 0 and not partition.options.virtual_ranks and not split:
        return True
    steps_on = partition.device if partition.states is None else torch.device("cpu")
    need, kind = need_of(optimizer, steps_on), type(optimizer).__name__
    if partition.options.virtual_ranks:
        check_repeats(optimizer, need, steps_on)
    if isinstance(optimizer, AveragingOptimizer) and partition.options.stage >= 1:
        raise PartitionError(
            f"{kind} averages over the ranks by itself and needs all states on every rank, but stage "
            f"{partition.options.stage} shards them. Use stage 0, or AdamW."
        )
    if need is Need.MODEL and partition.options.stage >= 1:
        raise PartitionError(
            f"{kind} gives other results when each rank updates a part of the model, because it "
            "looks at all parameters together. Use stage 0, or an optimizer that treats parameters one by one."
        )
    if split and (need is not Need.ELEMENTS or isinstance(optimizer, NormOptimizer)):
        raise PartitionError(
            f"{kind} needs full parameters, but of '{split[0]}' this rank has a part (it is marked model_parallel) and "
            "other model-parallel ranks the rest. Use an optimizer that treats elements one by one: AdamW for example, "
            "or one whose class says elementwise = True."
        )
    return need is not Need.ELEMENTS
