"""A torch optimizer that updates only this rank's fragments, and the transaction around its step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zero_precision import LossScale, NoLossScale

from .agreed_gradients import AgreedGradients, GradientAgreement
from .errors import NonFiniteGradientError, PartitionError
from .groups import AddParamGroup, check_groups
from .model_parts import ModelParts, UnsplitModel
from .needs import AveragingOptimizer, Need, NormOptimizer, check_repeats, need_of, refuse_unusable
from .norm import GridSquares, NormSquared, grid_squares, norm_squared
from .optimizer_states import ListedParameter, OptimizerStates, sharded_state
from .optimizer_tensors import OptimizerTensors, left_by_an_engine
from .partition import Partition
from .planning import update_dtype
from .updates import FragmentUpdate, OwnedFragment, Touched, connect_norms, connect_positions, update_for

_ANEW = (
    "Build a new optimizer over the model's parameters. To keep its states, save a checkpoint before engine.destroy() "
    "and load it into the new engine."
)
_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm


@dataclass(frozen=True)
class StepResult:
    """The result of a step: the global gradient norm before clipping (unscaled), whether the update was taken, and what
    a step post-hook of the user's ``raised`` on this rank after it."""

    norm: float
    taken: bool
    raised: Exception | None = None


class ShardedOptimizer:
    """Wraps any ``torch.optim.Optimizer`` built over the model's parameters.

    The optimizer object stays the user's: its param groups keep their dicts and hyperparameters, only their
    ``params`` become what this rank updates. So schedulers and ``group["lr"] = …`` work. An elementwise optimizer gets
    one tensor per parameter and shard; one that needs full parameters (Muon, Adafactor) gets those that this rank
    owns.

    ``clip``: maximal global norm, 0 for off. ``skip_non_finite``: skip the step instead of raising when the norm is
    not finite and there is no loss scale. ``squares``: what the norm is summed from under virtual ranks. ``parts``:
    what this rank's model is of the full one.

    Raises `PartitionError` naming what is wrong: foreign or duplicate parameters, an optimizer that would be wrong
    here.
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
        self._adopt(optimizer)
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
        self._gradients = GradientAgreement(
            optimizer, self._tensors, partition, self._parts, norm=norm, squares=squares
        )
        partition.runtime.watch_optimizer(optimizer)
        partition.runtime.on_close(self._states.give_back)
        partition.runtime.on_close(AddParamGroup(optimizer, partition).remove)
        partition.updated_by(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own param groups."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by fragment."""
        return self.inner.state

    def state_of(self, owned: OwnedFragment) -> Mapping[str, Any]:
        """The state of a fragment that the wrapped optimizer itself holds: nothing where a tier keeps the states."""
        return self._states.held_by_optimizer(owned)

    def replace_state(self, owned: OwnedFragment, state: dict[str, Any] | None) -> None:
        """Have the wrapped optimizer itself hold ``state`` of a fragment, None for nothing."""
        self._states.replace(owned, state)

    def step(self) -> StepResult:
        """One transaction: agree on overflow and on who had gradients, clip once, update, publish. Collective.

        Raises `NonFiniteGradientError` on every rank, naming the first parameter, when the norm is not finite and
        nothing skips it.
        """
        runtime = self._partition.runtime
        runtime.held_gradients.refuse_torn("step")
        check_groups(self.inner, [parameter.tensor for parameter in chain.from_iterable(self._listed)])
        self._states.take()
        self._tensors.check_states()
        runtime.end_backward()
        runtime.gradient_watch.end()
        runtime.released_use.step_begins()
        self._gradients.refuse_incomplete()
        agreed = self._gradients.agree()
        runtime.held_gradients.hide()
        norm = math.sqrt(agreed.square) / self.loss_scale.scale if agreed.square >= 0 else math.nan
        finite = math.isfinite(agreed.square)
        if not finite and isinstance(self.loss_scale, NoLossScale) and not self._skip_non_finite:
            runtime.held_gradients.forget()
            found = f"the first gradient that is not finite belongs to parameter '{agreed.culprit}'"
            if not agreed.culprit:
                found = "every gradient is finite, but the sum of their squares is not, in float64"
            raise NonFiniteGradientError(
                f"the gradient norm of step {runtime.step} is {norm}: {found}. The weights were not changed. Check the "
                "loss and the data of this step, lower the learning rate, or set bf16.check_grad_overflow to true to "
                "skip such steps."
            )
        raised = self._update_weights(agreed, self._factor(norm)) if finite else None
        self.loss_scale.update(not finite)  # the step's gradients have the scale of before
        runtime.held_gradients.forget()
        return StepResult(norm, finite, raised)

    def _update_weights(self, agreed: AgreedGradients, factor: float) -> Exception | None:
        """Update and publish; return what a post-hook of the user's raised. A pre-hook that raises on any rank ends the
        step on all of them, before anything is written."""
        runtime = self._partition.runtime
        raised: list[Exception | None] = []
        self._partition.readers.wait()
        with contextlib.ExitStack() as writing:

            def step(begin: Callable[[], None] | None = None) -> None:
                def written() -> None:
                    if agreed.hooked:
                        runtime.agree("step hooks", "", None)
                    writing.enter_context(runtime.writing("the step"))
                    if begin is not None:
                        begin()

                raised.append(self._step_inner(written, agreed.touched))

            with self._tensors.opened():
                self._update.run(agreed.touched, factor, step)
            self._partition.publish()
        for index, flags in agreed.touched.items():
            self._partition.units[index].edits.bump_versions(flags)
        return raised[0]

    def synchronise(self) -> bool:
        """Bring the weights together where the optimizer let ranks step alone; whether they changed. Collective."""
        if not isinstance(self.inner, AveragingOptimizer):
            return False
        with self._tensors.opened():
            return self.inner.synchronise()

    def gradient_norm(self) -> float:
        """The global norm of the unscaled gradients so far; where ranks keep their own, the root mean square of their
        norms, which the norm of the average never exceeds. Collective."""
        return math.sqrt(self._gradients.agree().square) / self.loss_scale.scale

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients (clipping outside the step)."""
        for gradients in self._partition.runtime.gradients.values():
            if gradients.is_reduced:
                with gradients.averaged(dirty=True) as averaged:
                    averaged.mul_(factor)
        self._partition.runtime.user_gradients.refresh()

    def _factor(self, norm: float) -> float:
        factor = 1.0 / self.loss_scale.scale
        if self.clip > 0:
            factor *= min(1.0, self.clip / (norm + _CLIP_EPSILON))
        return factor

    def _step_inner(self, begin: Callable[[], None], touched: Touched) -> Exception | None:
        self._stepping = True
        try:
            return self._tensors.step(begin, [] if self._partition.states else list(self._updated_elsewhere(touched)))
        finally:
            self._stepping = False

    def _updated_elsewhere(self, touched: Touched) -> Iterator[nn.Parameter]:
        """The tensors of parameters that have a gradient and of which this rank updates nothing."""
        for parameter in chain.from_iterable(self._listed):
            if parameter.owned is None and (place := self._places.get(parameter.name)) is not None:
                index, number = place
                if index in touched and touched[index][number]:
                    yield parameter.tensor

    def _refuse_direct_step(self, *_: Any) -> None:
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
        """Have what user code does to the tensors of the param groups count, or be refused."""
        partition, runtime = self._partition, self._partition.runtime
        listed = list(chain.from_iterable(self._listed))

        def has_gradient(name: str) -> bool:
            if (place := self._places.get(name)) is None:
                return False
            index, number = place
            gradients = runtime.gradients[index]
            return (gradients.is_reduced or gradients.has_unreduced) and gradients.touched[number]

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
        runtime.on_close(tensors.release)
        return tensors

    def _name_in_model(self, parameter: nn.Parameter) -> str:
        found = self._partition.find(parameter)
        return "" if found is None else found[0].names[found[1]]

    def _adopt(self, optimizer: Optimizer) -> None:
        """Exchange the model's parameters in the param groups for this rank's fragments."""
        old_state = dict(optimizer.state)
        optimizer.state.clear()
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            listed = []
            for position, parameter in enumerate(group["params"]):
                name, owned = self._own(parameter, number, position, seen)
                if owned is not None and parameter in old_state:
                    state = sharded_state(old_state[parameter], name, parameter.shape, owned)
                    optimizer.state[owned.tensor] = state
                tensor = self._empty_like(parameter) if owned is None else owned.tensor
                listed.append(ListedParameter(name, parameter.shape, owned, tensor))
            self._listed.append(listed)
            group["params"] = [parameter.tensor for parameter in listed]
            self.fragments.extend(parameter.owned for parameter in listed if parameter.owned is not None)

    def _empty_like(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor at the place of a parameter of which this rank updates nothing."""
        found = self._partition.find(parameter)
        dtype = parameter.dtype if found is None else update_dtype(found[0].plan, self._partition.options.policy)
        empty = torch.empty(0, dtype=dtype, device=self._partition.device)
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def _own(
        self, parameter: nn.Parameter, group: int, position: int, seen: set[int]
    ) -> tuple[str, OwnedFragment | None]:
        """The name of a listed parameter, and what this rank updates of it."""
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
        return unit.names[index], self._update.own(unit, index)


def _needs_full_parameters(optimizer: Optimizer, partition: Partition, parts: ModelParts) -> bool:
    """Return whether ``optimizer`` needs full parameters; refuses one that would be wrong on a part of the model."""
    split = [
        n
        for unit in partition.units
        for n, p in zip(unit.names, unit.parameters, strict=True)
        if parts.holds_part_of(p)
    ]
    if partition.options.stage == 0 and not partition.options.virtual_ranks and not split:
        return True
    need, kind = need_of(optimizer), type(optimizer).__name__
    if partition.options.virtual_ranks:
        check_repeats(optimizer, need)
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
