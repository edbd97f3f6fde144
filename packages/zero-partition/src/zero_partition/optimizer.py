"""A torch optimizer that updates only this rank's fragments, and the transaction around its step."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_precision import LossScale, NoLossScale

from .elementwise import must_be_whole
from .errors import NonFiniteGradientError, PartitionError
from .layout import Entry, Fragment
from .norm import NormSquared, norm_squared
from .partition import Partition
from .unit import Unit

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm


@dataclass(frozen=True)
class StepResult:
    """What a step did: the global gradient norm before clipping (unscaled), and whether the update was taken."""

    norm: float
    taken: bool


@dataclass(frozen=True)
class OwnedFragment:
    """A fragment this rank updates: ``tensor`` is the optimizer's parameter, a view of the unit's master."""

    unit: Unit
    fragment: Fragment
    tensor: nn.Parameter

    @property
    def reduced_start(self) -> int:
        """First element in the unit's master and reduced gradient."""
        base = self.fragment.rank * self.unit.layout.shard_numel if self.unit_is_whole else 0
        return base + self.fragment.shard_offset

    @property
    def unit_is_whole(self) -> bool:
        """Whether this rank updates the whole unit (stage 0)."""
        return self.unit.master is not None and self.unit.master.numel() == self.unit.layout.numel


class ShardedOptimizer:
    """Wraps any elementwise ``torch.optim.Optimizer`` built over the model's parameters.

    The optimizer object stays the user's: its param groups keep their dicts and hyperparameters, only their
    ``params`` become this rank's fragments, one tensor per parameter and shard. So schedulers and ``group["lr"] = …``
    work.

    ``clip``: maximal global norm, 0 for off. ``skip_non_finite``: skip the step instead of raising when the norm is
    not finite and there is no loss scale. ``refuse``: reasons are raised by name: foreign or duplicate parameters, an
    optimizer that is not elementwise.
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
    ) -> None:
        self._whole = must_be_whole(optimizer, sharded=partition.options.stage >= 1)
        self.inner = optimizer
        self.clip = clip
        self.loss_scale: LossScale = loss_scale if loss_scale is not None else NoLossScale()
        self._partition = partition
        self._skip_non_finite = skip_non_finite
        self._norm = norm
        self.fragments: list[OwnedFragment] = []
        self._stepping = False
        self._adopt(optimizer)
        optimizer.register_step_pre_hook(self._refuse_direct_step)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own param groups."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by fragment."""
        return self.inner.state

    def step(self) -> StepResult:
        """One transaction: agree on overflow and on who had gradients, clip once, update, publish. Collective.

        Raises `NonFiniteGradientError` on every rank, naming the first parameter, when the norm is not finite and
        nothing skips it.
        """
        runtime = self._partition.runtime
        runtime.end_backward()
        touched, total, culprit = self._agree_on_gradients()
        runtime.hide_gradients()
        norm = math.sqrt(total) / self.loss_scale.scale if total >= 0 else math.nan
        finite = math.isfinite(total)
        if not finite and isinstance(self.loss_scale, NoLossScale) and not self._skip_non_finite:
            runtime.reducer.clear()
            raise NonFiniteGradientError(
                f"the gradient norm of step {runtime.step} is {norm}: the first gradient that is not finite belongs to "
                f"parameter '{culprit}'. The weights were not changed. Check the loss and the data of this step, lower "
                "the learning rate, or set bf16.check_grad_overflow to true to skip such steps. At stage 3 NaN is also "
                "what a released parameter reads as, when forward reaches it by iterating over parameters()."
            )
        taken = self.loss_scale.update(not finite)
        if taken:
            self._update(touched, self._factor(norm))
            self._partition.publish()
        runtime.reducer.clear()
        return StepResult(norm, taken)

    def gradient_norm(self) -> float:
        """The global norm of the unscaled gradients so far. Collective."""
        _, total, _ = self._agree_on_gradients()
        return math.sqrt(total) / self.loss_scale.scale

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients (clipping outside the step)."""
        for gradients in self._partition.runtime.gradients.values():
            if gradients.reduced is not None:
                gradients.reduced.mul_(factor)

    def _factor(self, norm: float) -> float:
        factor = 1.0 / self.loss_scale.scale
        if self.clip > 0:
            factor *= min(1.0, self.clip / (norm + _CLIP_EPSILON))
        return factor

    def _agree_on_gradients(self) -> tuple[dict[int, list[bool]], float, str]:
        """Return which parameters of each unit had a gradient on any rank, the global sum of squares, and the name of
        the first parameter whose gradient is not finite. One message, unless gradients came late on some rank."""
        runtime = self._partition.runtime
        whole = self._partition.options.stage == 0
        while True:
            squares = self._squares()
            mine = squares[self._partition.rank]
            culprit = "" if math.isfinite(mine) else self._first_non_finite()
            late = runtime.reducer.unreduced()
            answers = runtime.agree("step", "", [late, mine, self._untouched(), culprit])
            if not any(answer[0] for answer in answers):
                break
            runtime.reduce_late({unit for answer in answers for unit in answer[0]})
        total = 0.0
        for rank, answer in enumerate(answers):
            total += squares[rank] if whole else answer[1]
        touched = {i: [True] * len(g.touched) for i, g in runtime.gradients.items() if g.reduced is not None}
        for index, flags in touched.items():
            for number in set.intersection(*(set(answer[2].get(str(index), ())) for answer in answers)):
                flags[number] = False
        return touched, total, next((answer[3] for answer in answers if answer[3]), "")

    def _squares(self) -> list[float]:
        """By rank, the sum of squares of its shards' gradients; only this rank's entry below stage 0."""
        partition = self._partition
        squares = [0.0] * partition.world_size
        for gradients in partition.runtime.gradients.values():
            reduced, size = gradients.reduced, gradients.unit.layout.shard_numel
            if reduced is None:
                continue
            for rank in partition.owned_ranks():
                part = reduced if partition.options.stage else reduced[rank * size : (rank + 1) * size]
                squares[rank] += self._norm(part)
        return squares

    def _untouched(self) -> dict[str, list[int]]:
        """By unit, the numbers of the parameters that had no gradient here."""
        present = {i: g.touched for i, g in self._partition.runtime.gradients.items() if g.reduced is not None}
        return {
            str(i): [k for k, t in enumerate(touched) if not t] for i, touched in present.items() if not all(touched)
        }

    def _first_non_finite(self) -> str:
        for owned in self.fragments:
            gradient = self._gradient(owned)
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                return owned.fragment.entry.name
        return ""

    def _gradient(self, owned: OwnedFragment) -> torch.Tensor | None:
        reduced = self._partition.runtime.gradients[owned.unit.index].reduced
        if reduced is None:
            return None
        start = owned.reduced_start
        return reduced[start : start + owned.fragment.length].view(owned.tensor.shape)

    @torch.no_grad()
    def _update(self, touched: dict[int, list[bool]], factor: float) -> None:
        for owned in self.fragments:
            gradient = self._gradient(owned)
            _, number = self._numbers[id(owned.tensor)]
            if gradient is None or not touched[owned.unit.index][number]:
                owned.tensor.grad = None
                continue
            if gradient.dtype != owned.tensor.dtype:
                gradient = gradient.to(owned.tensor.dtype)
            owned.tensor.grad = gradient
        if factor != 1.0:
            grads = [o.tensor.grad for o in self.fragments if o.tensor.grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)
        self._stepping = True
        try:
            self.inner.step()
        finally:
            self._stepping = False
        for owned in self.fragments:
            owned.tensor.grad = None

    def _refuse_direct_step(self, *_: Any) -> None:
        if not self._stepping:
            raise PartitionError(
                "optimizer.step() was called directly and would do nothing: the engine holds the gradients. "
                "Call engine.step()"
            )

    def _adopt(self, optimizer: Optimizer) -> None:
        """Exchange the model's parameters in the param groups for this rank's fragments."""
        old_state = dict(optimizer.state)
        optimizer.state.clear()
        self._numbers: dict[int, tuple[int, int]] = {}
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            tensors: list[nn.Parameter] = []
            for position, parameter in enumerate(group["params"]):
                for owned in self._own(parameter, number, position, seen):
                    self.fragments.append(owned)
                    tensors.append(owned.tensor)
                    if parameter in old_state:
                        optimizer.state[owned.tensor] = _cut_state(old_state[parameter], parameter, owned)
            group["params"] = tensors

    def _own(self, parameter: nn.Parameter, group: int, position: int, seen: set[int]) -> Iterator[OwnedFragment]:
        where = f"param_groups[{group}]['params'][{position}]"
        if id(parameter) in seen:
            raise PartitionError(
                f"{where} (shape {tuple(parameter.shape)}) is in the optimizer twice; list every parameter once"
            )
        seen.add(id(parameter))
        found = self._partition.find(parameter)
        if found is None:
            if not parameter.requires_grad or parameter.numel() == 0:
                return
            raise PartitionError(
                f"{where} (shape {tuple(parameter.shape)}) does not belong to the model given to initialize; "
                "build the optimizer over that model's parameters"
            )
        unit, number = found
        if unit.master is None:
            return
        for fragment in self._fragments(unit, unit.layout.entries[number]):
            base = fragment.rank * unit.layout.shard_numel if unit.master.numel() == unit.layout.numel else 0
            start = base + fragment.shard_offset
            view = unit.master[start : start + fragment.length]
            tensor = nn.Parameter(view.view(fragment.entry.shape) if self._whole else view)
            self._numbers[id(tensor)] = (unit.index, number)
            yield OwnedFragment(unit, fragment, tensor)

    def _fragments(self, unit: Unit, entry: Entry) -> list[Fragment]:
        """The parts of one parameter that this rank updates; one piece for an optimizer that needs whole parameters."""
        if self._whole:
            return [Fragment(entry, 0, 0, entry.offset, entry.numel)]
        return [f for rank in self._partition.owned_ranks() for f in unit.layout.fragments(rank) if f.entry is entry]


def _cut_state(state: dict[str, Any], parameter: nn.Parameter, owned: OwnedFragment) -> dict[str, Any]:
    """The part of a whole parameter's optimizer state that belongs to a fragment."""
    start, end = owned.fragment.param_offset, owned.fragment.param_offset + owned.fragment.length
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
            cut[key] = value.flatten()[start:end].clone()
        else:
            cut[key] = copy.deepcopy(value)
    return defaultdict(dict, cut) if isinstance(state, defaultdict) else cut
