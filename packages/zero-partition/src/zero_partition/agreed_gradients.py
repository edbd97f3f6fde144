"""Agree on a step's gradients: the global norm, the parameters that had one, the first that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from .errors import PartitionError
from .groups import hyperparameters, hyperparameters_digest
from .host_facts import any_gradient
from .messages import StepReport, decode_each, distinct
from .model_parts import ModelParts
from .needs import AveragingOptimizer
from .norm import ExactSums, GridNorm, GridSquares, NormSquared, NormSums, RankOrderSums
from .optimizer_tensors import OptimizerTensors
from .partition import Partition
from .placeholder import Placeholders, any_written
from .updates import start_in_reduced


class AgreedGradients(NamedTuple):
    """What all ranks know of a step's gradients after `GradientAgreement.agree`.

    ``touched``: by unit index, for each parameter, whether any rank had a gradient. ``square``: the global sum of
    squares. ``culprit``: name of the first parameter whose gradient is not finite, empty for none. ``hooked``: some
    rank has step pre-hooks of the user's.
    """

    touched: dict[int, list[bool]]
    square: float
    culprit: str
    hooked: bool


class GradientAgreement:
    """Exchanges, in one message, the facts that each rank knows of the reduced gradients.

    ``norm``: sums a shard's squares; under virtual ranks ``squares`` does instead, and the sums are exact.
    ``tensors``: the optimizer's, which know whether user code has registered step pre-hooks. ``places``: of the
    parameters in its param groups, by name, the unit's index and the position in it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: OptimizerTensors,
        places: Mapping[str, tuple[int, int]],
        partition: Partition,
        parts: ModelParts,
        *,
        norm: NormSquared,
        squares: GridSquares,
    ) -> None:
        self._optimizer = optimizer
        self._tensors = tensors
        self._partition = partition
        self._parts = parts
        self._frozen = [
            (name, partition.units[index].parameters[number])
            for name, (index, number) in places.items()
            if index not in partition.runtime.gradients
        ]
        self._placeholders: list[Placeholders] = []  # whose values no gather reads
        if partition.device.type != "cpu":
            self._placeholders = [placeholders for unit in partition.units for placeholders in unit.placeholders]
        exact = partition.options.virtual_ranks > 0
        self._sums: NormSums = ExactSums() if exact else RankOrderSums()
        self._norms: dict[tuple[int, int], Callable[[torch.Tensor], Any]] = {
            (index, rank): GridNorm(squares) if exact else parts.norm_of(gradients.unit, rank, norm)
            for index, gradients in partition.runtime.gradients.items()
            for rank in partition.owned_ranks()
        }
        for index, gradients in partition.runtime.gradients.items():
            gradients.norm = self._norms[index, partition.rank]

    def agree(self) -> AgreedGradients:
        """Take over gradients that user code wrote, and return the facts that all ranks agree on. Collective.

        One message, unless late or edited gradients have to be reduced first. Raises `PartitionError` on every rank
        when hyperparameters differ between ranks, or gradients were written on some ranks only; and on the rank where
        a frozen parameter has one. Raises `ReleasedParameterError` where code wrote into a released parameter.
        """
        self._refuse_frozen()
        self._refuse_written()
        runtime = self._partition.runtime
        apart = isinstance(self._optimizer, AveragingOptimizer) and self._optimizer.wants_own_gradients
        full = self._partition.options.stage == 0 and not apart
        user = runtime.user_gradients
        user.take(stepping=True)
        while True:
            squares = self._squares()
            mine = sum(squares) if apart else squares[self._partition.rank]
            culprit = "" if math.isfinite(mine) else self._first_non_finite()
            report = StepReport(
                runtime.reducer.unreduced(),
                self._sums.pack(mine),
                self._untouched(),
                culprit,
                user.report(),
                self._tensors.is_hooked,
                hyperparameters_digest(self._optimizer.param_groups),
            )
            reports = decode_each(StepReport.decode, runtime.agree("step", "", report.encode()))
            if len({one.hyperparameters for one in reports}) > 1:
                self._refuse_hyperparameters()
            if user.settle([one.written for one in reports]):
                continue
            if not any(one.late for one in reports):
                break
            runtime.held_gradients.reduce_late({unit for one in reports for unit in one.late})
        user.check([one.written for one in reports], [one.untouched for one in reports])
        shards = reports[: self._partition.world_size]  # other replicas have the same shards
        if full:
            total = self._sums.total([self._sums.pack(square) for square in squares])
        else:
            total = self._sums.total([one.square / len(reports) if apart else one.square for one in shards])
        touched = {i: [True] * len(g.touched) for i, g in runtime.gradients.items() if g.is_reduced}
        for index, flags in touched.items():
            for number in set.intersection(*(set(one.untouched.get(index, ())) for one in distinct(reports))):
                flags[number] = False
        culprit = next((one.culprit for one in reports if one.culprit), "")
        hooked = any(one.hooked for one in reports)
        return AgreedGradients(touched, *self._parts.total(runtime.step, total, culprit), hooked)

    def _refuse_hyperparameters(self) -> NoReturn:
        """Raise `PartitionError` that names the first hyperparameter that differs between ranks. Collective."""
        mine = hyperparameters(self._optimizer.param_groups)
        everyones = self._partition.runtime.agree("hyperparameters", "", mine)
        for (group, key), value in ((tuple(place), value) for place, value in everyones[0]):
            found = [next((v for p, v in one if tuple(p) == (group, key)), None) for one in everyones]
            apart = next((rank for rank, other in enumerate(found) if other != value), None)
            if apart is not None:
                raise PartitionError(
                    f"param_groups[{group}]['{key}']: expected the same on every rank, got {value} on rank 0 and "
                    f"{found[apart]} on rank {apart}. Set it alike: give a schedule that follows the loss the mean "
                    "over the ranks (torch.distributed.all_reduce). The weights were not changed."
                )
        raise PartitionError("param_groups: expected the same keys on every rank. The weights were not changed.")

    def _refuse_frozen(self) -> None:
        """Raise `PartitionError` if a parameter of the param groups that the engine does not train has a ``.grad``."""
        with torch._C.DisableTorchFunctionSubclass():
            if any_gradient([parameter for _, parameter in self._frozen]):
                name = next(name for name, parameter in self._frozen if parameter.grad is not None)
                raise PartitionError(
                    f"parameter '{name}' was frozen when the engine was made and has a .grad, with which torch's "
                    "optimizer would update it. Set it to None, or make the engine while the parameter requires "
                    "gradients. The weights were not changed."
                )

    def _refuse_written(self) -> None:
        """Raise `ReleasedParameterError` if code wrote into a released parameter and no gather has read its values."""
        memory = [values for placeholders in self._placeholders for values in placeholders.tensors()]
        if memory and bool(any_written(memory)):
            for placeholders in self._placeholders:
                placeholders.verify_values()

    def refuse_incomplete(self) -> None:
        """Raise `PartitionError` if some micro-batches of a step under virtual ranks are missing.

        Every rank raises, as all have had as many.
        """
        for gradients in self._partition.runtime.gradients.values():
            leaves = gradients.leaves
            if leaves is not None and 0 < leaves.added < leaves.count:
                raise PartitionError(
                    f"this step has the gradients of {leaves.added} micro-batches, but under "
                    f"deterministic.across_world_sizes every rank takes {leaves.count} a step. Call backward once for "
                    "each, and zero_grad() only before the first or after the last."
                )

    def _squares(self) -> list[Any]:
        """Return by rank the sum of squares of its shards' gradients: all ranks' at stage 0, else only this rank's,
        and zeros for the others."""
        partition = self._partition
        squares = [self._sums.zero()] * partition.world_size
        for index, gradients in partition.runtime.gradients.items():
            if not gradients.is_reduced:
                continue
            if partition.options.stage:
                squares[partition.rank] = squares[partition.rank] + gradients.square()
                continue
            with gradients.averaged() as averaged:
                for rank, part in enumerate(averaged.chunk(partition.world_size)):
                    squares[rank] = squares[rank] + self._norms[index, rank](part)
        return squares

    def _untouched(self) -> dict[int, list[int]]:
        """Return by unit index the numbers of the parameters that had no gradient on this rank."""
        present = {i: g.touched for i, g in self._partition.runtime.gradients.items() if g.is_reduced}
        return {i: [k for k, t in enumerate(touched) if not t] for i, touched in present.items() if not all(touched)}

    def _first_non_finite(self) -> str:
        """Return the name of the first parameter whose gradient, in this rank's shards, is not finite; "" for none."""
        for gradients in self._partition.runtime.gradients.values():
            if not gradients.is_reduced:
                continue
            with gradients.averaged() as averaged:
                for rank in self._partition.owned_ranks():
                    for fragment in gradients.unit.layout.fragments(rank):
                        start = start_in_reduced(gradients.unit, fragment)
                        if not bool(torch.isfinite(averaged[start : start + fragment.length]).all()):
                            return fragment.entry.name
        return ""
