"""Reducing gradients: in one agreed order, as much as possible while backward runs."""

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

_IN_FLIGHT = 2  # reductions whose local sum is still to do: one travels while the next unit fills
_LEARNING_PASSES = 3  # passes whose order is learned at most, when they do not repeat before


class StartedReduction(NamedTuple):
    """A reduction of the running pass: its number there, its unit, and how many gathers have to be issued before
    anybody waits for it (see [Note: waits] in interleaving.py)."""

    number: int
    unit: int
    gathers_first: int
    numel: int
    work: Work


class OrderedReductions:
    """The reductions of one engine, started in the order that the ranks have agreed.

    Starting a reduction never waits for another rank. At most two are meant to travel at a time, and ``bucket_numel``
    elements: see `crowded`. ``complete``: every pass reduces every unit, when it has all its gradients.

    Attributes:
        started: how many reductions the last pass has started.
        settled: the order is learned.
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
        """Forget the running pass, whose reductions will not arrive, and all that was learned."""
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
        """Return whether a reducing backward pass is running."""
        return self._queue is not None

    @property
    def next_unit(self) -> int | None:
        """The unit whose reduction comes next; None when all of the pass are started."""
        return self._queue[0] if self._queue else None

    @property
    def crowded(self) -> bool:
        """Return whether more travels than is meant to."""
        travelling = self._travelling
        return len(travelling) > _IN_FLIGHT or sum(one.numel for one in travelling) > self._bucket_numel

    @property
    def oldest(self) -> StartedReduction | None:
        """The first of the reductions that travel."""
        return self._travelling[0] if self._travelling else None

    def begin(self, units: Iterable[int]) -> None:
        """Start a reducing pass over ``units``, the same set on every rank."""
        chosen = set(units)
        self._queue = deque(index for index in self._order if index in chosen)
        self._completions = {}
        self._steady = True
        self.started = 0
        self._gathers_first = self._find_gathers_first()

    def comes_within(self, position: int | None) -> bool:
        """Return whether the next reduction must start before anybody waits for the gather at ``position`` of the
        pass's order (None: for anything that is not of this pass)."""
        if not self._queue:
            return False
        return position is None or self._gathers_first[self._queue[0]] <= position

    def start_next(self) -> None:
        """Start the next reduction with the gradients that are there; only when there is a `next_unit`."""
        if self._queue:
            self.start(self._queue.popleft())

    def start(self, index: int) -> None:
        """Start the reduction of a unit."""
        gradients = self._by_unit[index]
        work = gradients.start_reduce(self._step.value, self._device)
        first = self._gathers_first.get(index, 0)
        self._travelling.append(StartedReduction(self.started, index, first, gradients.unit.layout.numel, work))
        self.started += 1

    def in_order(self, units: Iterable[int]) -> list[int]:
        """``units`` in the agreed order."""
        chosen = set(units)
        return [index for index in self._order if index in chosen]

    def older_in_hops(self) -> Iterator[StartedReduction]:
        """Yield the reductions of several hops that travel, but for the newest one."""
        yield from [one for one in list(self._travelling)[:-1] if one.work.has_hops]

    def advance_within(self, position: int | None) -> None:
        """Take the reductions that `comes_within` said yes to to their last hop; all ranks start them here."""
        for one in self._travelling:
            if position is None or one.gathers_first <= position:
                one.work.advance()

    def advance_first(self, count: int) -> None:
        """Take the pass's first ``count`` reductions, which every rank has started, to their last hop."""
        for one in self._travelling:
            if one.number < count:
                one.work.advance()

    def finish_oldest(self) -> None:
        """Wait for the first of the reductions that travel."""
        one = self._travelling.popleft()
        one.work.wait()
        self._by_unit[one.unit].end_reduce()

    def close(self) -> None:
        """The running pass is over: its reductions have arrived."""
        self._queue = None

    def note_complete(self, index: int) -> None:
        """This rank has all gradients of a unit that the running pass brings."""
        self._completions.setdefault(index, len(self._gathers.used))

    def note_late(self, index: int) -> None:
        """A unit had another number of gradients than in the pass before, which shows when autograd is done."""
        self._completions[index] = len(self._gathers.used)
        self._steady = False

    def is_complete(self, index: int) -> bool:
        """Return whether `note_complete` was called for a unit in the running pass."""
        return index in self._completions

    def note_end(self) -> None:
        """Autograd is done."""
        self._gathered = list(self._gathers.used)

    def forget_observed(self) -> None:
        """Nothing is learned of the last pass."""
        self._completions = {}

    def observed(self) -> ReductionsSeen | None:
        """Return what this rank saw in the last pass, until an order is settled."""
        if self.settled or self.active or not self._completions:
            return None
        return ReductionsSeen([Completion(*c) for c in self._completions.items()], self._gathered, self._steady)

    def learn(self, observed: Sequence[ReductionsSeen | None]) -> None:
        """Adopt the order of the first rank that saw one, and the gathers that every rank needed before each unit was
        complete (rank order); same result on every rank."""
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
        """By unit, the gathers that must have been issued before anybody waits for its reduction."""
        order = self._gathers.order
        after: dict[int | None, int] = {unit: number + 1 for number, unit in enumerate(order)}
        after[None] = 0
        unknown = len(order)
        last = self._last_needed
        counts = [after.get(last[u], unknown) if u in last else unknown for u in self._order]
        return dict(zip(self._order, accumulate(counts, max), strict=True))


class StartsReductions(Protocol):
    """Starts reductions and waits for them, where this rank may."""

    def start_next(self) -> None:
        """Start the next reduction of the pass with the gradients that are there, and make room for it."""

    def reduce(self, units: Iterable[int], /) -> None:
        """Reduce ``units`` outside a pass."""

    def finish_all(self) -> None:
        """Wait for every reduction that was started."""


class Reducer:
    """Decides when each unit's gradients are averaged.

    A unit is due when all the gradients that it is expected to get have arrived (expected.py), or when its modules did
    not run here: then it contributes zeros without waiting. What is not due by the end of the pass is reduced there.
    Gradients that arrive after their unit was reduced stay, are announced at the next agreement point, and are reduced
    then. Where the user sees the averages before that (stage 0), a unit waits for what can still come, whether its
    modules ran or not, and late gradients are refused (`settle_late`).

    Where passes are complete (see `OrderedReductions`), a unit whose modules ran waits for all its gradients or for the
    end of the pass, whatever it had last time; late gradients are refused.

    Attributes:
        torn: why the gradients hold a part of a backward pass only, which failed; None where they do not.
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
        """Forget what was seen of passes."""
        self._expected = ExpectedGradients(self._by_unit)
        self._ran: set[int] = set()
        self._late: list[int] = []

    @property
    def active(self) -> bool:
        """Return whether a reducing backward pass is running."""
        return self._reductions.active

    @property
    def started(self) -> int:
        """How many reductions the last pass has started."""
        return self._reductions.started

    def mark_ran(self, unit: int) -> None:
        """Note that the unit's modules run in a forward whose gradients may come."""
        if unit in self._by_unit:
            self._ran.add(unit)

    def pending(self) -> list[int]:
        """Units of this rank that a reducing backward pass has to consider."""
        everything = self._reductions.complete or not self._expected.may_be_late
        return sorted(self._by_unit if everything else self._ran | set(self.unreduced()))

    def late(self) -> list[int]:
        """Units with gradients that came too late for their reduction in the last reducing pass."""
        return [index for index in self._late if self._by_unit[index].has_unreduced]

    def forget_late(self) -> None:
        """A pass begins that does not reduce: what it adds to a unit cannot be told from what came late before it."""
        self._late = []

    def unreduced(self) -> list[int]:
        """Units with gradients that no reduction has taken."""
        return [index for index, g in self._by_unit.items() if g.has_unreduced]

    def begin(self, units: Iterable[int]) -> None:
        """Start a reducing pass over ``units`` (those that any rank has to consider); the same set on every rank."""
        self._expected.begin()
        self._reductions.begin(units)
        self._start_due()

    def arrived(self, index: int, number: int) -> bool:
        """Count the gradient of a unit's parameter ``number``; return True when it was the last one expected in this
        pass."""
        last = self._expected.arrived(index, number)
        ready = self._by_unit[index].has_all if self._reductions.complete else last
        if ready and not self._reductions.is_complete(index):
            self._reductions.note_complete(index)
            self._start_due()
        return last

    def start_rest(self) -> None:
        """All gradients of the pass are there: start what is left, in order."""
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
        """End the pass: wait for every reduction."""
        self._starts.finish_all()
        if self.active:
            self._late = self.unreduced()
        self._reductions.close()
        self._ran.clear()

    def abandon(self) -> None:
        """End a pass that failed: wait for the reductions that were started, which every rank has started."""
        self.finish()
        self._reductions.forget_observed()

    def settle_late(self) -> None:
        """After a reducing pass in which no gradient may be late (it is complete, or the user sees its averages):
        reduce late ones where no other rank has a part in it, else refuse them by name."""
        if self._expected.may_be_late and not self._reductions.complete:
            return
        late = self.unreduced()
        if not late:
            return
        gradients = self._by_unit[late[0]]
        if gradients.is_alone and not self._reductions.complete:
            self.reduce_now(late)
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

    def reduce_now(self, units: Iterable[int]) -> None:
        """Reduce ``units`` outside a pass (late gradients); the same set on every rank."""
        self._starts.reduce(units)

    def clear(self) -> None:
        """Forget all gradients."""
        self.torn = None
        self._ran.clear()
        self._late = []
        for gradients in self._by_unit.values():
            gradients.clear()

    def _start_due(self) -> None:
        while (index := self._reductions.next_unit) is not None and self._due(index):
            self._starts.start_next()

    def _due(self, index: int) -> bool:
        if self._reductions.complete:
            return self._by_unit[index].has_all or self._is_idle(index)
        return self._expected.has_come(index) or (self._expected.may_be_late and self._is_idle(index))

    def _is_idle(self, index: int) -> bool:
        """Return whether the unit's modules did not run here, and nothing of it waits."""
        return index not in self._ran and not self._by_unit[index].has_unreduced
