"""The collaborators of a pass on one rank, built as `Runtime` builds them, over the groups of memory_groups."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from memory_groups import MemoryRank

from zero_partition.agreement import Agreement, Liveness
from zero_partition.arrivals import GradientArrivals
from zero_partition.calls import ModuleCalls
from zero_partition.gatherer import Gatherer
from zero_partition.gradient_hook import GradientHook
from zero_partition.gradients import UnitGradients
from zero_partition.held_gradients import HeldGradients
from zero_partition.interleaving import Interleaving
from zero_partition.live import UnitState
from zero_partition.messages import StepNumber
from zero_partition.ordered_gathers import OrderedGathers
from zero_partition.ordered_reductions import OrderedReductions
from zero_partition.recovery import Recovery
from zero_partition.reducer import Reducer
from zero_partition.training_loop import FollowedLoop
from zero_partition.unannounced import UnannouncedUse
from zero_partition.unit import Unit
from zero_partition.unit_watch import WatchedUnits
from zero_partition.user_edits import UserEdits
from zero_partition.user_gradients import UserGradients

UNITS = 3
STEP = 7


class Parts:
    """``full_gradients``: every rank keeps the full averages, as at stage 0. ``releasable``: parameters are sharded."""

    def __init__(
        self, rank: MemoryRank, *, releasable: bool = True, full_gradients: bool = False, bucket_numel: int = 1000
    ) -> None:
        self.rank = rank
        self.units = [rank.unit(index, releasable=releasable) for index in range(UNITS)]
        self.gradients = [self._gradients(unit, full_gradients) for unit in self.units]
        self.by_unit = dict(enumerate(self.gradients))
        self.words: list[str] = []
        self.ended: list[BaseException] = []
        self.backward_done: list[int] = []
        step, world_size = StepNumber(STEP), rank.control.world_size
        self.gathers = OrderedGathers(self.units, step)
        self.reductions = OrderedReductions(
            self.gradients, self.gathers, step, torch.device("cpu"), bucket_numel=bucket_numel
        )
        self.user_gradients = UserGradients(self.gradients, FollowedLoop())
        self.liveness = Liveness(self.ended.append, lambda: None, sharded=True)
        self.calls = ModuleCalls()
        edits = UserEdits(self.units, world_size, rank.broadcast)
        self.agreement = Agreement(
            rank.control, self.liveness, self.units, step, self.gathers, self.reductions, edits, self.user_gradients
        )
        self.interleaving = Interleaving(self.gathers, self.reductions, self.agreement.agree_in_lock_step)
        self.gatherer = Gatherer(
            self.units,
            self.gathers,
            self.interleaving,
            self.agreement.request,
            rank.residency,
            rank.live,
            prefetch_numel=0,
            max_live_numel=1000,
        )
        self.reducer = Reducer(self.gradients, self.reductions, self.interleaving)
        watched = WatchedUnits()
        watched.watch = SimpleNamespace(backward_done=lambda unit: self.backward_done.append(unit.index))  # type: ignore[assignment]
        self.arrivals = GradientArrivals(self.units, self.by_unit, self.gatherer, self.reducer, self.liveness, watched)
        self.held = HeldGradients(self.gradients, self.user_gradients, self.reducer, self.agreement, self.calls, step)
        self.unannounced = UnannouncedUse(self.units, self.gathers, self.gatherer, self.reducer, self.liveness)
        groups: Any = SimpleNamespace(control=self, issued=self.issued)
        self.recovery = Recovery(
            groups, step, self.gathers, self.reductions, self.interleaving, self.gatherer, self.reducer
        )

    # -- what `Recovery` asks of a control group ---------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self.rank.control.world_size

    is_torn = False
    """True: an exchange was left before its end."""

    meets_others = True
    """False: the other ranks have not failed, so that nobody answers `confer`."""

    def confer(self, call: str, step: int, _failure: BaseException, payload: Any, _patience: float) -> list[Any] | None:
        return self.agreement.agree("failed", f"{call} of step {step}", payload) if self.meets_others else None

    def record_failed_call(self, failure: BaseException, when: str) -> None:
        self.words.append(f"{type(failure).__name__}: {failure}, {when}")

    def issued(self) -> dict[str, int]:
        return {"gather": len(self.rank.gather.issued), "reduce": len(self.rank.reduce.issued)}

    # -- a pass ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a backward pass over all units."""
        self.gatherer.begin("backward")
        self.interleaving.begin()
        for unit in self.units:
            self.reducer.mark_ran(unit.index)
        self.reducer.begin(range(UNITS))

    def end(self) -> None:
        """Finish it."""
        self.reducer.start_rest()
        self.interleaving.leave_lock_step()
        self.gatherer.end()
        self.reducer.finish()
        self.interleaving.end()

    def compute(self, index: int) -> None:
        """Gather a unit and add this rank's gradients of it to its buffer: 1 plus the rank."""
        unit = self.units[index]
        self.gatherer.gather(unit)
        for number, parameter in enumerate(unit.parameters):
            gradient = torch.full(parameter.shape, 1.0 + self.rank.rank, dtype=torch.float64)
            self.gradients[index].add(number, gradient, more_follow=False)
            self.reducer.arrived(index, number)

    def hooks(self, index: int) -> list[GradientHook]:
        """Hooks that report a unit's gradients to `arrivals`."""
        return [GradientHook(p, self._reporter(index, number)) for number, p in enumerate(self.units[index].parameters)]

    def released(self) -> bool:
        return all(unit.state is UnitState.RELEASED for unit in self.units)

    def averages(self) -> list[float | None]:
        """The first element of each unit's average."""
        return [None if g.reduced is None else float(g.reduced[0]) for g in self.gradients]

    def _reporter(self, index: int, number: int) -> Callable[[GradientHook], None]:
        return lambda hook: self.arrivals.ready(index, number, hook)

    def _gradients(self, unit: Unit, full: bool) -> UnitGradients:
        made = self.rank.gradients(unit)
        if not full:
            return made
        dtype = torch.float64
        return UnitGradients(
            unit,
            self.rank.reduce,  # type: ignore[arg-type]
            accumulate_dtype=dtype,
            wire_dtype=dtype,
            keep_flat=False,
            full_group=self.rank.gather,  # type: ignore[arg-type]
        )
