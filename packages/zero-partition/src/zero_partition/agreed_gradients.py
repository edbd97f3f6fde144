"""Agree on a step's gradients: the global norm, the parameters that had one, the first that is not finite.

A rank's sum of squares is that of the gradients in its shards; the global norm is the root of the global sum. A step
whose norm the host does not wait for is a deferred one. Virtual ranks make results the same at any number of ranks
([Note: virtual ranks] in leaves.py).
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from .device_norm import DeviceNorm, DeviceSquare
from .device_values import HostCopy
from .errors import STEP_DROPPED, NonFiniteGradientError, PartitionError, ReleasedParameterError
from .groups import hyperparameters, hyperparameters_digest
from .host_facts import any_gradient
from .messages import StepReport, decode_each, distinct
from .model_parts import ModelParts, UnsplitModel
from .needs import AveragingOptimizer
from .norm import ExactSums, GridNorm, GridSquares, NormSquared, NormSums, RankOrderSums
from .optimizer_tensors import OptimizerTensors
from .partition import Partition
from .placeholder import Placeholders, any_written
from .step_result import norm_of
from .unit_edits import without_torch_function
from .updates import Factor, Touched, start_in_reduced

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to the norm


class AgreedGradients(NamedTuple):
    """The facts of a step's gradients that all ranks know after `GradientAgreement.agree`.

    ``touched``: by unit index, for each parameter, whether any rank had a gradient. ``square``: the global sum of
    squares; None while only the device knows it. ``culprit``: name of the first parameter whose gradient is not finite,
    empty for none. ``hooked``: some rank has step pre-hooks of the user's. ``on_device``: the sum of squares there,
    where the gradients are on an accelerator.
    """

    touched: dict[int, list[bool]]
    square: float | None
    culprit: str
    hooked: bool
    on_device: DeviceSquare | None = None

    def factor(self, clip: float, scale: float) -> Factor:
        """Return the factor to multiply the step's gradients with, which removes the loss ``scale`` and clips to a
        global norm of ``clip`` (0: no clipping): a number, or a 0-D tensor on the device while only the device knows
        the norm."""
        if clip > 0 and self.square is None and self.on_device is not None:
            return self.on_device.factor(clip, _CLIP_EPSILON, scale)
        factor = 1.0 / scale
        if clip > 0 and self.square is not None:
            factor *= min(1.0, clip / (norm_of(self.square, scale) + _CLIP_EPSILON))
        return factor


class GradientAgreement:
    """Exchanges, in one message, the facts that each rank knows of the reduced gradients.

    ``partition``: the sharded model. ``norm``: sums a shard's squares; under virtual ranks (see leaves.py) ``squares``
    does instead, and the sums are exact. ``tensors``: the optimizer's, which know whether user code has registered step
    pre-hooks. ``places``: for each parameter in its param groups, by name, the index of its unit and its position
    there. ``parts``: the relation of this rank's model to the full one under tensor parallelism.

    [Note: norms on accelerators] There the sum of squares is added up and reduced over the ranks on the device. Where
    the optimizer can skip a step by itself (`DeviceGuard`) and a norm that is not finite is an error, the host does not
    wait for it: it continues with the next forward, and learns the sum with the message of the next step, from the
    first rank that has it by then. If it is not finite, that step raises on every rank; the weights are those from
    before both.
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
        exact = partition.options.virtual_ranks > 0
        self._sums: NormSums = ExactSums() if exact else RankOrderSums()
        is_plain = not exact and isinstance(parts, UnsplitModel) and not isinstance(optimizer, AveragingOptimizer)
        on_device = partition.device.type != "cpu"
        self._device = DeviceNorm(partition) if on_device and is_plain and partition.states is None else None
        self._deferred: DeviceSquare | None = None
        self._unread: list[Placeholders] = []  # whose values nothing else reads
        if on_device and self._device is None:
            self._unread = [placeholders for unit in partition.units for placeholders in unit.placeholders]
        self._norms: dict[tuple[int, int], Callable[[torch.Tensor], Any]] = {
            (index, rank): GridNorm(squares) if exact else parts.norm_of(gradients.unit, rank, norm)
            for index, gradients in partition.runtime.gradients.items()
            for rank in partition.owned_ranks()
        }
        for index, gradients in partition.runtime.gradients.items():
            gradients.norm = self._norms[index, partition.rank]
            gradients.is_norm_plain = is_plain

    def agree(self, *, defers: bool = False, covers: Callable[[Touched], bool] = bool) -> AgreedGradients:
        """Take over gradients that user code wrote, and return the facts that all ranks agree on. Collective.

        One message, unless late or edited gradients have to be reduced first. ``defers``: this rank can continue
        without the norm (see [Note: norms on accelerators]), if ``covers`` returns True for the parameters that any
        rank touched (by unit index, a flag per parameter). Raises `PartitionError` on every rank when hyperparameters,
        added parameters or frozen ones differ between ranks, or gradients were written on some ranks only; and on the
        rank where a parameter that is not trained has a ``.grad``. Raises `ReleasedParameterError` where code wrote
        into a released parameter, and `NonFiniteGradientError` on every rank if the norm of the deferred step before is
        not finite.
        """
        self._refuse_frozen()
        looking = self._look_for_writes()
        runtime = self._partition.runtime
        apart = isinstance(self._optimizer, AveragingOptimizer) and self._optimizer.wants_own_gradients
        user = runtime.user_gradients
        user.take(stepping=True)
        while True:
            squares = self._squares()
            self._refuse_written(looking)
            mine = sum(squares) if apart else squares[self._partition.rank]
            reports = self._exchange_reports(mine, defers=defers)
            if user.settle([one.written for one in reports]):
                continue
            if not any(one.late for one in reports):
                break
            runtime.held_gradients.reduce_late({unit for one in reports for unit in one.late})
        user.check([one.written for one in reports], [one.untouched for one in reports])
        touched = {i: [True] * len(g.touched) for i, g in runtime.gradients.items() if g.is_reduced}
        for index, flags in touched.items():
            for number in set.intersection(*(set(one.untouched.get(index, ())) for one in distinct(reports))):
                flags[number] = False
        hooked = any(one.hooked for one in reports)
        if self._device is not None:
            may_defer = all(one.defers for one in distinct(reports)) and covers(touched)
            return self._agree_on_device(self._device, touched, hooked, may_defer=may_defer)
        total = self._total(squares, reports, apart=apart)
        culprit = next((one.culprit for one in reports if one.culprit), "")
        return AgreedGradients(touched, *self._parts.total(runtime.step, total, culprit), hooked)

    def _exchange_reports(self, mine: Any, *, defers: bool) -> list[StepReport]:
        """Exchange the facts of this step; return every rank's report in rank order. Also learns the norm of the step
        before if that was deferred. Collective.

        ``mine``: this rank's sum of squares. ``defers``: this rank can continue without the norm. Raises
        `PartitionError` on every rank if hyperparameters, added parameters or frozen ones differ, and
        `NonFiniteGradientError` if the norm of the step before is not finite.
        """
        runtime = self._partition.runtime
        deferred = self._deferred
        report = StepReport(
            runtime.reducer.unreduced(),
            self._sums.pack(mine),
            self._untouched(),
            "" if self._device is not None or math.isfinite(mine) else self._first_non_finite(),
            runtime.user_gradients.report(),
            self._tensors.is_hooked,
            hyperparameters_digest(self._optimizer.param_groups),
            defers,
            deferred.read() if deferred is not None and deferred.is_here else None,
            self._partition.added.digest(),
            zlib.crc32("\n".join(frozen).encode()) if (frozen := self._newly_frozen()) else 0,
        )
        reports = decode_each(StepReport.decode, runtime.agree("step", "", report.encode()))
        if len({one.hyperparameters for one in reports}) > 1:
            self._refuse_hyperparameters()
        if len({one.added for one in reports}) > 1:
            self._partition.added.refuse(runtime.agree)
        if len({one.frozen for one in reports}) > 1:
            self._refuse_frozen_on_some_ranks()
        self._learn_deferred(next((one.earlier for one in reports if one.earlier is not None), None))
        return reports

    def _total(self, squares: list[Any], reports: Sequence[StepReport], *, apart: bool) -> float:
        """Return the global sum of squares. At stage 0 it is computed from ``squares``, by rank those of its shard, as
        every rank has all gradients; else from the sums in ``reports``, by rank. ``apart``: each rank's gradients are
        its own, not averages; then it is the mean of the reported sums. Sends nothing."""
        if self._partition.options.stage == 0 and not apart:
            return self._sums.total([self._sums.pack(square) for square in squares])
        shards = reports[: self._partition.world_size]  # other replicas have the same shards
        return self._sums.total([one.square / len(reports) if apart else one.square for one in shards])

    def _agree_on_device(
        self, norm: DeviceNorm, touched: dict[int, list[bool]], hooked: bool, *, may_defer: bool
    ) -> AgreedGradients:
        """Return the agreed facts of a step whose sum of squares is added up and reduced on the device. Collective.

        With ``may_defer`` the host does not wait for the sum: it is kept as the deferred one, and ``square`` is None.
        Else the host waits, and learns the culprit if the sum is not finite. ``norm``: adds up the squares.
        ``touched``: by unit index, for each parameter, whether any rank had a gradient. ``hooked``: some rank has step
        pre-hooks.
        """
        square = norm.square()
        if may_defer:
            self._deferred = square
            return AgreedGradients(touched, None, "", hooked, square)
        total = square.read()
        culprit = ""
        if not math.isfinite(total):
            culprit = self._why_not_finite(norm, self._first_non_finite)
        return AgreedGradients(touched, total, culprit, hooked, square)

    def _why_not_finite(self, norm: DeviceNorm, first: Callable[[], str]) -> str:
        """Return the name that ``first()`` returns on the first rank where it is not "": of a parameter or unit whose
        gradient on that rank is not finite. "" if it is "" on every rank. Collective.

        Raises `ReleasedParameterError` on every rank if code wrote into a released parameter on any, which ``norm``
        finds.
        """
        written = ""
        try:
            norm.refuse_written()
        except ReleasedParameterError as error:
            written = str(error)
        told = self._partition.runtime.agree("not finite", "", [written, first()])
        problem = next((problem for problem, _ in told if problem), "")
        if problem:
            raise ReleasedParameterError(problem)
        return next((name for _, name in told if name), "")

    def learn_deferred(self) -> None:
        """Wait until the host knows the norm of the last step; do nothing if it was not deferred. Every rank calls it
        at the same point. If it is not finite, raises on every rank: `ReleasedParameterError` where code wrote into a
        released parameter, else `NonFiniteGradientError`, after the gradients were forgotten.
        """
        self._learn_deferred(None)

    def _learn_deferred(self, square: float | None) -> None:
        """Learn the sum of squares of the deferred step: it is ``square``, which a rank has read, or with None the
        device's, which is waited for. Do nothing if no step is deferred. Raises as `learn_deferred` does."""
        deferred, self._deferred = self._deferred, None
        if deferred is None or self._device is None:
            return
        if square is None:
            square = deferred.read()
        deferred.settle(square)
        if math.isfinite(square):
            return
        unit = self._why_not_finite(self._device, deferred.first_unit)
        self._partition.runtime.held_gradients.forget()
        self._partition.refuse_placeholder_buffers()
        found = f"the first gradient that is not finite belongs to unit '{unit}'"
        raise NonFiniteGradientError(
            f"the gradient norm of step {deferred.step} is {square}: "
            f"{found if unit else 'every gradient is finite, but the sum of their squares is not'}. The device left "
            "the weights as they were, and what came after that step was discarded. Check the loss and the data of "
            "that step, lower the learning rate, or set bf16.check_grad_overflow to true to skip such steps."
        )

    def _refuse_hyperparameters(self) -> NoReturn:
        """Raise `PartitionError` that names the first hyperparameter that differs between ranks, with two of its
        values, after the ranks have exchanged all of them. Collective."""
        mine = hyperparameters(self._optimizer.param_groups)
        everyones = self._partition.runtime.agree("hyperparameters", "", mine)
        for (group, key), value in ((tuple(place), value) for place, value in everyones[0]):
            found = [next((v for p, v in one if tuple(p) == (group, key)), None) for one in everyones]
            apart = next((rank for rank, other in enumerate(found) if other != value), None)
            if apart is not None:
                raise PartitionError(
                    f"param_groups[{group}]['{key}']: expected the same on every rank, got {value} on rank 0 and "
                    f"{found[apart]} on rank {apart}. Set it alike: give a schedule that follows the loss the mean "
                    f"over the ranks (torch.distributed.all_reduce). {STEP_DROPPED}"
                )
        raise PartitionError(f"param_groups: expected the same keys on every rank. {STEP_DROPPED}")

    def _refuse_frozen_on_some_ranks(self) -> NoReturn:
        """Raise `PartitionError` that names the first parameter that only some ranks have frozen. Collective. Called on
        every rank when the digests of their frozen parameters differ."""
        everyones = [set(names) for names in self._partition.runtime.agree("frozen", "", self._newly_frozen())]
        apart = sorted(set.union(*everyones) - set.intersection(*everyones))
        frozen = [rank for rank, names in enumerate(everyones) if apart[0] in names]
        trained = [rank for rank in range(len(everyones)) if rank not in frozen]
        raise PartitionError(
            f"parameter '{apart[0]}' requires gradients on ranks {trained} and none on ranks {frozen}: the average "
            "would count zeros for those. Call requires_grad_() alike on every rank, and take the forward and backward "
            f"again. {STEP_DROPPED}"
        )

    def _refuse_frozen(self) -> None:
        """Raise `PartitionError` if a parameter of the param groups that the engine does not train has a ``.grad``,
        with which torch's optimizer would update it."""
        with torch._C.DisableTorchFunctionSubclass():
            if any_gradient([parameter for _, parameter in self._frozen]):
                name = next(name for name, parameter in self._frozen if parameter.grad is not None)
                raise PartitionError(
                    f"parameter '{name}' was frozen when the engine was made and has a .grad, with which torch's "
                    "optimizer would update it. Set it to None, or make the engine while the parameter requires "
                    "gradients. The weights were not changed."
                )

    def _look_for_writes(self) -> HostCopy | None:
        """Start to look, on the device, whether code wrote into a released parameter. Return the answer on its way to
        the host (a non-zero value for yes); None where another part reads these values or there are none."""
        memory = [values for placeholders in self._unread for values in placeholders.tensors()]
        return HostCopy(any_written(memory).view(1)) if memory else None

    def _refuse_written(self, looking: HostCopy | None) -> None:
        """Raise `ReleasedParameterError`, which names the parameter, if code wrote into a released parameter.
        ``looking``: the answer of `_look_for_writes`, or None, for which nothing is done. Waits for the device."""
        if looking is not None and any(looking.read()):
            for placeholders in self._unread:
                placeholders.verify_values()

    def refuse_incomplete(self) -> None:
        """Raise `PartitionError` if the step, under virtual ranks, has gradients of some of its micro-batches and not
        of all. Do nothing without virtual ranks.

        Every rank raises, as all have had the same number of micro-batches.
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
        """Return by rank the sum of squares of the gradients in its shards: of all ranks at stage 0, else only of this
        rank, and zeros for the others. Waits for the device; where `DeviceNorm` adds them up instead, returns only
        zeros, at once."""
        partition = self._partition
        squares = [self._sums.zero()] * partition.world_size
        if self._device is not None:
            return squares
        self._await_squares()
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

    def _await_squares(self) -> None:
        """Wait until the host has the sums of squares of gradients on their way from an accelerator to a tier, and hand
        each to its `UnitGradients`; also wait for these gradients, which the tier's step reads. Do nothing where there
        are no such sums."""
        found = [(g, g.square_on_device) for g in self._partition.runtime.gradients.values()]
        pending = [(gradients, square) for gradients, square in found if square is not None]
        if self._partition.states is None or not pending:
            return
        self._partition.states.join_gradients()
        arriving = HostCopy(torch.stack([square for _, square in pending]))
        for (gradients, _), square in zip(pending, arriving.read(), strict=True):
            gradients.settle_square(square)

    def _untouched(self) -> dict[int, list[int]]:
        """Return by unit index the indices of the parameters that had no gradient on this rank; only units that were
        reduced and have such parameters."""
        present = {i: g.touched for i, g in self._partition.runtime.gradients.items() if g.is_reduced}
        return {i: [k for k, t in enumerate(touched) if not t] for i, touched in present.items() if not all(touched)}

    @without_torch_function
    def _newly_frozen(self) -> list[str]:
        """Return the names of the parameters that were trained at first and require no gradient now."""
        units = [gradients.unit for gradients in self._partition.runtime.gradients.values()]
        changed = [unit for unit in units if not all(map(_REQUIRES_GRAD, unit.parameters))]
        return [n for u in changed for n, p in zip(u.names, u.parameters, strict=True) if not p.requires_grad]

    def _first_non_finite(self) -> str:
        """Return the name of the first parameter whose gradient, in the shards that this rank updates, is not finite;
        "" for none. Reads the values, so an accelerator is waited for."""
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
