"""Reduce gradients in an order that all ranks have agreed on, overlapped with backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from zero_comm import Work

from .errors import PartitionError
from .expected import ExpectedGradients
from .gatherer import OrderedGathers
from .gradients import UnitGradients
from .messages import Completion, ReductionsSeen, StepNumber

_IN_FLIGHT = 2  # reductions that are not finished: one travels while the next unit's gradients arrive
_LEARNING_PASSES = 3  # the order is learned from so many passes at most, from fewer if they repeat


class StartedReduction(NamedTuple):
    """A reduction in flight.

    ``number``: its position in the pass. ``unit``: index of its unit. ``gathers_first``: number of the pass's gathers
    that a rank has to issue before it waits for the reduction (see [Note: waits] in interleaving.py). ``numel``:
    elements of the unit. ``work``: to be waited for.
    """

    number: int
    unit: int
    gathers_first: int
    numel: int
    work: Work


class OrderedReductions:
    """The reductions of one engine, started in the order that the ranks have agreed.

    Starting a reduction never waits for another rank. At most two reductions should be in flight at a time, and only
    one if two have more than ``bucket_numel`` elements: see `crowded`. ``gradients``: of the trained units.
    ``gathers``: the engine's gathers, whose order the reductions are related to. ``step``: number for tags. ``device``:
    where units without any gradient reduce zeros. ``complete``: every pass reduces every unit, each when it has all its
    gradients.

    Attributes:
        started: number of reductions that the running pass, or the last one, has started.
        settled: the order is final; nothing more is learned.
        complete: as given.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        gathers: OrderedGathers,
        step: StepNumber,
        device: torch.device,
        *,
        bucket_numel: int,
        complete: bool = False,
    ) -> None:
        self._by_unit = {g.unit.index: g for g in gradients}
        self._gathers = gathers
        self._step = step
        self._device = device
        self._bucket_numel = bucket_numel
        self.complete = complete
        self._travelling: deque[StartedReduction] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget the running pass, whose reductions will not complete, and the learned order; the order is then the
        reverse of the units'."""
        self._order = list(reversed(self._by_unit))
        self._queue: deque[int] | None = None
        self._travelling.clear()
        self._completions: dict[int, int] = {}
        self._gathered: list[int] = []
        self._steady = True
        self._learned = 0
        self._last_needed: dict[int, int | None] = {}
        self._gathers_first: dict[int, int] = {}
        self.started = 0
        self.settled = False

    @property
    def active(self) -> bool:
        """Whether a reducing backward pass is running."""
        return self._queue is not None

    @property
    def next_unit(self) -> int | None:
        """Index of the unit whose reduction is the next to start; None if all are started, or no pass runs."""
        return self._queue[0] if self._queue else None

    @property
    def crowded(self) -> bool:
        """Whether more reductions, or elements, are in flight than there should be; never for one reduction alone."""
        count = len(self._travelling)
        return count > _IN_FLIGHT or (count > 1 and sum(one.numel for one in self._travelling) > self._bucket_numel)

    @property
    def oldest(self) -> StartedReduction | None:
        """The reduction in flight that was started first; None if there is none."""
        return self._travelling[0] if self._travelling else None

    def begin(self, units: Iterable[int]) -> None:
        """Begin a reducing pass over ``units`` (by index), the same set on every rank."""
        chosen = set(units)
        self._queue = deque(index for index in self._order if index in chosen)
        self._completions = {}
        self._steady = True
        self.started = 0
        self._gathers_first = self._find_gathers_first()

    def must_start_before(self, position: int | None) -> bool:
        """Return whether the next reduction must start before a rank waits for the gather at ``position`` of the pass's
        order (None: before it waits for anything outside the pass); False if none is left to start."""
        if not self._queue:
            return False
        return position is None or self._gathers_first[self._queue[0]] <= position

    def start_next(self) -> None:
        """Start the reduction of `next_unit` with the gradients that have arrived; nothing if there is none."""
        if self._queue:
            self.start(self._queue.popleft())

    def start(self, index: int) -> None:
        """Start the reduction of the unit ``index`` with the gradients that have arrived (zeros for the others), in a
        pass or outside."""
        gradients = self._by_unit[index]
        work = gradients.start_reduce_scatter(self._step.value, self._device)
        first = self._gathers_first.get(index, 0)
        self._travelling.append(StartedReduction(self.started, index, first, gradients.unit.layout.numel, work))
        self.started += 1

    def in_order(self, units: Iterable[int]) -> list[int]:
        """Return ``units`` (indices) in the agreed order; units that are not trained are left out."""
        chosen = set(units)
        return [index for index in self._order if index in chosen]

    def older_in_hops(self) -> Iterator[StartedReduction]:
        """Yield the reductions in flight that take several hops (`zero_comm.Work.advance`), except the newest."""
        yield from [one for one in list(self._travelling)[:-1] if one.work.has_hops]

    def advance_before(self, position: int | None) -> None:
        """Advance to their last hop the reductions that every rank starts before it waits for the gather at
        ``position`` (see `must_start_before`)."""
        for one in self._travelling:
            if position is None or one.gathers_first <= position:
                one.work.advance()

    def advance_first(self, count: int) -> None:
        """Advance the pass's first ``count`` reductions, which every rank has started, to their last hop."""
        for one in self._travelling:
            if one.number < count:
                one.work.advance()

    def finish_oldest(self) -> None:
        """Wait for the oldest reduction in flight, which there has to be, and have its unit take the result."""
        one = self._travelling.popleft()
        one.work.wait()
        self._by_unit[one.unit].finish_reduce_scatter()

    def close(self) -> None:
        """End the running pass, whose reductions are all finished."""
        self._queue = None

    def note_complete(self, index: int) -> None:
        """Record that this rank has all gradients of the unit ``index`` that the running pass gives it; only the first
        call in a pass counts."""
        self._completions.setdefault(index, len(self._gathers.used))

    def note_late(self, index: int) -> None:
        """Record that the unit ``index`` is complete only now, as autograd has ended: its number of gradients was
        unexpected.

        The pass then does not count as steady (see `ReductionsSeen`).
        """
        self._completions[index] = len(self._gathers.used)
        self._steady = False

    def is_complete(self, index: int) -> bool:
        """Return whether `note_complete` or `note_late` was called for the unit ``index`` in the running pass."""
        return index in self._completions

    def note_end(self) -> None:
        """Record the units that this rank has gathered by the end of autograd's run."""
        self._gathered = list(self._gathers.used)

    def forget_observed(self) -> None:
        """Drop the observations of the last pass, so that nothing is learned from it."""
        self._completions = {}

    def observed(self) -> ReductionsSeen | None:
        """Return this rank's observations of the last pass; None inside a pass, without any, and once `settled`."""
        if self.settled or self.active or not self._completions:
            return None
        return ReductionsSeen([Completion(*c) for c in self._completions.items()], self._gathered, self._steady)

    def learn(self, observed: Sequence[ReductionsSeen | None]) -> None:
        """Learn from the ranks' observations (in rank order, at least one not None) the order of reductions, and which
        gathers come before each.

        The order is that of the first rank with observations, then units that it did not observe. A reduction comes
        after every gather that any rank needed before the unit was complete. The result is the same on every rank.
        """
        seen = [one for one in observed if one is not None]
        first = [completion.unit for completion in seen[0].completions]
        self._order = [*first, *(i for i in self._order if i not in first)]
        place = {unit: number for number, unit in enumerate(self._gathers.order)}
        needed: dict[int, set[int]] = {}
        for one in seen:
            for unit, count in one.completions:
                needed.setdefault(unit, set()).update(one.gathered[:count])
        self._last_needed = {
            unit: max((u for u in units if u in place), key=place.__getitem__, default=None)
            for unit, units in needed.items()
        }
        self._learned += 1
        self.settled = all(one.steady for one in seen) or self._learned >= _LEARNING_PASSES
        self._completions = {}

    def _find_gathers_first(self) -> dict[int, int]:
        """Return, by unit, how many gathers of the pass a rank has to issue before it waits for the reduction.

        At least as many as for the reduction before; all of them where nothing was learned.
        """
        order = self._gathers.order
        after: dict[int | None, int] = {unit: number + 1 for number, unit in enumerate(order)}
        after[None] = 0
        unknown = len(order)
        last = self._last_needed
        counts = [after.get(last[u], unknown) if u in last else unknown for u in self._order]
        return dict(zip(self._order, accumulate(counts, max), strict=True))


class StartsReductions(Protocol):
    """Starts reductions and waits for them without a deadlock among gathers and reductions; `Interleaving` is one."""

    def start_next(self) -> None:
        """Start the next reduction of the pass with the gradients that have arrived; finish older ones to make room."""

    def reduce_scatter_now(self, units: Iterable[int], /) -> None:
        """Reduce-scatter the gradients of ``units`` (indices) outside a pass, and wait for every reduction in flight.

        Collective, the same units on every rank, in any order.
        """

    def finish_all(self) -> None:
        """Wait for every reduction in flight."""


class Reducer:
    """Decides when each unit's gradients are averaged.

    A unit is due when all the gradients that it is expected to get have arrived (expected.py), or when its modules did
    not run here: then it contributes zeros without waiting. Units that are not due by the end of the pass are reduced
    there. Gradients that arrive after their unit was reduced are kept, announced at the next agreement point, and
    reduced then. Where the user sees the averages before that (stage 0), a unit waits for all gradients that can still
    come, whether its modules ran or not, and late gradients are refused (`settle_late`).

    Where passes are complete (see `OrderedReductions`), a unit whose modules ran waits for all its gradients or for the
    end of the pass, however many it had last time; late gradients are refused.

    ``gradients``: of the trained units. ``reductions``: their order. ``starts``: starts reductions and waits for them.

    Attributes:
        torn: the failure of a backward pass that left only a part of its gradients; None if there was none.
    """

    def __init__(
        self, gradients: Sequence[UnitGradients], reductions: OrderedReductions, starts: StartsReductions
    ) -> None:
        self._by_unit = {g.unit.index: g for g in gradients}
        self._reductions = reductions
        self._starts = starts
        self.reset()
        self.torn: str | None = None

    def reset(self) -> None:
        """Forget everything learned from passes: expected gradients, modules that ran, late gradients."""
        self._expected = ExpectedGradients(self._by_unit)
        self._ran: set[int] = set()
        self._late: list[int] = []

    @property
    def active(self) -> bool:
        """Whether a reducing backward pass is running."""
        return self._reductions.active

    @property
    def started(self) -> int:
        """Number of reductions that the running pass, or the last one, has started."""
        return self._reductions.started

    def mark_ran(self, unit: int) -> None:
        """Note that modules of the unit with index ``unit`` run in a forward that may lead to gradients; nothing for a
        frozen unit."""
        if unit in self._by_unit:
            self._ran.add(unit)

    def pending(self) -> list[int]:
        """Return the units that this rank has to reduce in a pass that begins now, by index in ascending order.

        They are those whose modules ran or that have unreduced gradients; all where none may be late or passes are
        complete.
        """
        everything = self._reductions.complete or not self._expected.may_be_late
        return sorted(self._by_unit if everything else self._ran | set(self.unreduced()))

    def late(self) -> list[int]:
        """Return the units (indices) whose gradients came too late for their reduction in the last reducing pass and
        still await one."""
        return [index for index in self._late if self._by_unit[index].has_unreduced]

    def forget_late(self) -> None:
        """Forget which gradients were late: a pass that does not reduce is about to add to them."""
        self._late = []

    def unreduced(self) -> list[int]:
        """Return the indices of the units with gradients that no reduction has taken."""
        return [index for index, g in self._by_unit.items() if g.has_unreduced]

    def begin(self, units: Iterable[int]) -> None:
        """Begin a reducing pass over ``units`` (all that are `pending` on any rank); the same set on every rank."""
        self._expected.begin()
        self._reductions.begin(units)
        self._start_due()

    def arrived(self, index: int, number: int) -> bool:
        """Count the gradient of parameter ``number`` of the unit ``index``, and start reductions that are due.

        Return whether it was the last one that the unit is expected to get in this pass.
        """
        last = self._expected.arrived(index, number)
        ready = self._by_unit[index].has_all if self._reductions.complete else last
        if ready and not self._reductions.is_complete(index):
            self._reductions.note_complete(index)
            self._start_due()
        return last

    def start_rest(self) -> None:
        """Start the remaining reductions in the agreed order, as autograd has ended, and note which units got another
        number of gradients than expected; nothing outside a pass."""
        if not self.active:
            return
        if self._reductions.complete:
            for index in self._expected.reached():
                self._reductions.note_complete(index)
        for index in self._expected.end():
            self._reductions.note_late(index)
        self._reductions.note_end()
        while self._reductions.next_unit is not None:
            self._starts.start_next()

    def finish(self) -> None:
        """Wait for every reduction in flight and end the pass, if one runs, remembering the units with late
        gradients."""
        self._starts.finish_all()
        if self.active:
            self._late = self.unreduced()
        self._reductions.close()
        self._ran.clear()

    def abandon(self) -> None:
        """End a pass that failed, without learning from it: wait for the started reductions, the same on all ranks."""
        self.finish()
        self._reductions.forget_observed()

    def settle_late(self) -> None:
        """After a reducing pass in which no gradient may be late, reduce late ones on a single rank, else refuse them.

        None may be late where passes are complete, or the user sees the averages (stage 0); elsewhere does nothing.
        Raises `PartitionError`, naming a parameter.
        """
        if self._expected.may_be_late and not self._reductions.complete:
            return
        late = self.unreduced()
        if not late:
            return
        gradients = self._by_unit[late[0]]
        if gradients.is_alone and not self._reductions.complete:
            self.reduce_scatter_now(late)
            return
        name = next(n for n, p in zip(gradients.unit.names, gradients.present, strict=True) if p)
        came = f"the gradient of '{name}' came after its unit's reduction had begun: "
        if self._reductions.complete:
            raise PartitionError(
                f"{came}the parameter is used outside the modules that ran, or backward passes are nested (reentrant "
                "activation checkpointing). Under deterministic.across_world_sizes a micro-batch's gradient has to be "
                "complete before it is summed. Use the parameter inside its module's forward, and non-reentrant "
                "activation checkpointing."
            )
        raise PartitionError(
            f"{came}nested backward passes (reentrant activation checkpointing) reached it more often than before, and "
            "at stage 0 .grad shows the average right after backward. Use checkpoint(..., use_reentrant=False). The "
            "weights were not changed."
        )

    def reduce_scatter_now(self, units: Iterable[int]) -> None:
        """Reduce-scatter the (late) gradients of ``units`` (indices) outside a pass, and wait; the same set on every
        rank."""
        self._starts.reduce_scatter_now(units)

    def clear(self) -> None:
        """Forget the gradients of all units, and that a pass failed."""
        self.torn = None
        self._ran.clear()
        self._late = []
        for gradients in self._by_unit.values():
            gradients.clear()

    def _start_due(self) -> None:
        """Start reductions in the agreed order up to the first unit that is not due (see `_due`)."""
        while (index := self._reductions.next_unit) is not None and self._due(index):
            self._starts.start_next()

    def _due(self, index: int) -> bool:
        """Return whether the reduction of the unit ``index`` may start now: it has all its expected gradients, or its
        modules did not run here and none need be waited for."""
        if self._reductions.complete:
            return self._by_unit[index].has_all or self._is_idle(index)
        return self._expected.has_all_expected(index) or (self._expected.may_be_late and self._is_idle(index))

    def _is_idle(self, index: int) -> bool:
        """Return whether the modules of the unit ``index`` did not run on this rank and no gradient of it awaits a
        reduction."""
        return index not in self._ran and not self._by_unit[index].has_unreduced
