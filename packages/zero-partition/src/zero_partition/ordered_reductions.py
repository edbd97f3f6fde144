"""The reductions of one engine in the order that all ranks have agreed on, and how that order is learned.

A reduction is the reduce-scatter of one unit's gradients. A pass is here a backward pass that reduces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from zero_comm import Work

from .gradients import UnitGradients
from .messages import Completion, ReductionsSeen, StepNumber
from .ordered_gathers import OrderedGathers

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

    Starting a reduction never waits for another rank. One of several hops (collectives inside the node, then across
    nodes) starts its last hop only once the others are complete (`zero_comm.Work.advance`). At most two reductions
    should be in flight at a time, and only one if two have more than ``bucket_numel`` elements: see `over_limit`.

    ``gradients``: of the trained units. ``gathers``: the engine's gathers, whose order the reductions are related to.
    ``step``: number for tags. ``device``: where units without any gradient reduce zeros. ``complete``: every pass
    reduces every unit, each when it has all its gradients.

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
        reverse of the order of units."""
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
        """True while a reducing backward pass is running."""
        return self._queue is not None

    @property
    def next_unit(self) -> int | None:
        """Index of the unit whose reduction is the next to start; None if all are started, or no pass runs."""
        return self._queue[0] if self._queue else None

    @property
    def over_limit(self) -> bool:
        """True if more reductions, or more elements, are in flight than the class allows; False for one reduction
        alone."""
        count = len(self._travelling)
        return count > _IN_FLIGHT or (count > 1 and sum(one.numel for one in self._travelling) > self._bucket_numel)

    @property
    def oldest(self) -> StartedReduction | None:
        """The reduction in flight that was started first; None if there is none."""
        return self._travelling[0] if self._travelling else None

    def begin(self, units: Iterable[int]) -> None:
        """Begin a pass that reduces ``units`` (indices, the same set on every rank) in the agreed order; those that are
        not trained are left out. Starts no reduction."""
        chosen = set(units)
        self._queue = deque(index for index in self._order if index in chosen)
        self._completions = {}
        self._steady = True
        self.started = 0
        self._gathers_first = self._find_gathers_first()

    def must_start_before(self, position: int | None) -> bool:
        """Return whether the next reduction must start before a rank waits for the gather at ``position`` in the pass's
        order of gathers; False if none is left to start. None as position: before the rank waits for anything else."""
        if not self._queue:
            return False
        return position is None or self._gathers_first[self._queue[0]] <= position

    def start_next(self) -> None:
        """Start the reduction of `next_unit` with the gradients that have arrived; do nothing if there is none."""
        if self._queue:
            self.start(self._queue.popleft())

    def start(self, index: int) -> None:
        """Start the reduction of the unit with index ``index``, in a pass or outside, and count it in `started`.
        Gradients that have not arrived count as zeros. Does not wait; every rank must start the same reductions in the
        same order."""
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
        """Yield, oldest first, the reductions in flight that take several hops and have not started the last one; the
        newest reduction in flight is left out."""
        yield from [one for one in list(self._travelling)[:-1] if one.work.has_hops]

    def advance_before(self, position: int | None) -> None:
        """Start the last hop of each reduction in flight that every rank starts before it waits for the gather at
        ``position`` (see `must_start_before`). Blocks until the earlier hops of these are complete."""
        for one in self._travelling:
            if position is None or one.gathers_first <= position:
                one.work.advance()

    def advance_first(self, count: int) -> None:
        """Start the last hop of those of the pass's first ``count`` reductions that are in flight; every rank must have
        started them. Blocks until their earlier hops are complete."""
        for one in self._travelling:
            if one.number < count:
                one.work.advance()

    def finish_oldest(self) -> None:
        """Wait for the oldest reduction in flight, which there has to be, and have its unit's gradients take the result
        over."""
        one = self._travelling.popleft()
        one.work.wait()
        self._by_unit[one.unit].finish_reduce_scatter()

    def close(self) -> None:
        """End the running pass; all its reductions must be finished."""
        self._queue = None

    def note_complete(self, index: int) -> None:
        """Record that the unit with index ``index`` has on this rank all gradients that it gets in the running pass,
        and how many units the rank has used by now. Only the first call in a pass counts."""
        self._completions.setdefault(index, len(self._gathers.used))

    def note_late(self, index: int) -> None:
        """Record that the unit with index ``index`` is complete only now that autograd has ended, as it got another
        number of gradients than expected.

        The pass then does not count as steady (see `ReductionsSeen`), so that the order is not final after it.
        """
        self._completions[index] = len(self._gathers.used)
        self._steady = False

    def is_complete(self, index: int) -> bool:
        """Return whether `note_complete` or `note_late` was called for the unit with index ``index`` in the running
        pass."""
        return index in self._completions

    def note_end(self) -> None:
        """Record which units this rank has used by the end of autograd's run; `observed` returns them."""
        self._gathered = list(self._gathers.used)

    def forget_observed(self) -> None:
        """Drop this rank's observations of the last pass, so that nothing is learned from it."""
        self._completions = {}

    def observed(self) -> ReductionsSeen | None:
        """Return this rank's observations of the last pass, for the other ranks; None while a pass runs, if nothing was
        observed, and once the order is `settled`."""
        if self.settled or self.active or not self._completions:
            return None
        return ReductionsSeen([Completion(*c) for c in self._completions.items()], self._gathered, self._steady)

    def learn(self, observed: Sequence[ReductionsSeen | None]) -> None:
        """Learn the order of reductions, and which gathers come before each, from the ranks' observations. The result
        is the same on every rank.

        ``observed``: in rank order, at least one not None. The order becomes that of the first rank with observations,
        then the units that it did not observe. A reduction comes after every gather that any rank needed before the
        unit was complete. The order is `settled` once a pass was steady on all ranks, or after three passes.
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
        """Return, by unit index, how many gathers of the pass a rank has to issue before it waits for the unit's
        reduction.

        The numbers never fall along the order of reductions. A unit of which nothing was learned has all gathers before
        it.
        """
        order = self._gathers.order
        after: dict[int | None, int] = {unit: number + 1 for number, unit in enumerate(order)}
        after[None] = 0
        unknown = len(order)
        last = self._last_needed
        counts = [after.get(last[u], unknown) if u in last else unknown for u in self._order]
        return dict(zip(self._order, accumulate(counts, max), strict=True))
