"""The gathers and the reductions of one backward pass, interleaved so that no two ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .messages import LockStep, distinct
from .ordered_gathers import OrderedGathers
from .ordered_reductions import OrderedReductions
from .unit import Unit


class Interleaving:
    """Issues the gathers and starts the reductions that other ranks may wait for before this rank waits.

    [Note: waits] Gathers follow one agreed order and reductions another. Ranks that compute different units reach them
    at different times: rank 0 may wait for a reduction that rank 1 starts only after a gather that rank 0 has not
    issued. So the ranks agree, for every reduction, how many gathers of the pass's order come first: as many as any
    rank needed before its gradients were complete. Before a rank waits for a reduction, it issues those gathers. Before
    it waits for a gather behind them, it starts that reduction with the gradients that it has; gradients that come
    later are reduced after the pass. Ranks that compute the same units in the same order issue nothing early.

    A reduction may take several hops: collectives one after the other, such as one inside nodes and one between them.
    The last hop starts only when each rank calls `zero_comm.Work.advance`, or waits for the reduction. So a rank that
    starts a reduction because others may wait for it also advances it to its last hop.

    How many gathers come first is learned in the first passes. These run in lock step: before each wait the ranks meet
    and each says what it needs next, unless the last meeting has shown that all ranks have issued what this one waits
    for. Passes in which a reduction must wait for all its gradients always run in lock step.

    ``gathers``, ``reductions``: of the same engine. ``meet``: exchanges one message per rank in lock step, and returns
    all of them in rank order.
    """

    def __init__(
        self,
        gathers: OrderedGathers,
        reductions: OrderedReductions,
        meet: Callable[[LockStep], Sequence[LockStep]],
    ) -> None:
        self._gathers = gathers
        self._reductions = reductions
        self._meet = meet
        self._active = False
        self._lock_step = False
        self._issued_by_all = self._started_by_all = 0  # in lock step: gathers and reductions

    def begin(self) -> None:
        """Begin a backward pass that gathers and reduces. The pass is in lock step while the order of reductions is
        still learned, and always where reductions wait for all their gradients."""
        self._active = True
        self._issued_by_all = self._started_by_all = 0
        self._lock_step = self._reductions.complete or not self._reductions.settled

    def leave_lock_step(self) -> None:
        """Meet the other ranks until every rank has called this, and issue the gathers that they need meanwhile. Called
        when this rank has all its gradients and has started all its reductions. Does nothing outside lock step."""
        while self._lock_step and not all(message.done for message in self._exchange(-1, done=True)):
            continue
        self._lock_step = False

    def end(self) -> None:
        """End the pass, all of whose gathers and reductions have arrived."""
        self._active = self._lock_step = False

    def before_gather(self, unit: Unit) -> None:
        """Start the reductions that another rank may finish before it issues the gather of ``unit``; called before this
        rank waits for that gather. Do nothing outside a pass.

        In lock step, meet the other ranks instead, unless all of them are known to have issued the gather.
        """
        if self._lock_step:
            if self._gathers.position(unit) >= self._issued_by_all:
                self._exchange(self._gathers.position(unit))
        elif self._active:
            self._start_before(self._gathers.position(unit))

    def before_unscheduled_gather(self) -> None:
        """Start every remaining reduction of the pass, before a gather outside its order: other ranks join that only
        once they have finished the pass or request one themselves. Do nothing in lock step, where it is not needed, or
        outside a pass."""
        if self._active and not self._lock_step:
            self._start_before(None)

    def start_next(self) -> None:
        """Start the next reduction of the pass with the gradients that are there, and wait for the oldest ones while
        too many are in flight. Starts nothing if none is left."""
        self._reductions.start_next()
        self._make_room()

    def start_until(self, count: int) -> None:
        """Start reductions, with the gradients that are there, until ``count`` of the pass's reductions, or all of
        them, have been started."""
        while self._reductions.next_unit is not None and self._reductions.started < count:
            self.start_next()

    def reduce_scatter_now(self, units: Iterable[int]) -> None:
        """Reduce-scatter the gradients of ``units`` (indices) that came too late for the pass's reductions, outside a
        pass, and wait for every reduction in flight. Collective: the same set on every rank, in any order."""
        for index in self._reductions.in_order(units):
            self._reductions.start(index)
            self._make_room()
        self.finish_all()

    def start_now(self, units: Iterable[int]) -> None:
        """Start reductions of the gradients of ``units`` (indices) outside a pass, after finishing every reduction in
        flight; do nothing without units. Collective: the same set on every rank, in any order."""
        indices = self._reductions.in_order(units)
        if indices:
            self.finish_all()
        for index in indices:
            self._reductions.start(index)
            self._make_room()

    def finish_all(self) -> None:
        """Wait for every reduction that was started, oldest first, and have the units take the results."""
        while self._reductions.oldest is not None:
            self._finish_oldest()

    def _make_room(self) -> None:
        """Finish the oldest reductions while more are in flight than allowed (`OrderedReductions.over_limit`), after
        starting the last hop of all but the newest (see [Note: waits]). Before a wait, issue the gathers that others
        may wait for."""
        for one in self._reductions.older_in_hops():
            self._before_reduction(one.number, one.gathers_first)
            one.work.advance()
        while self._reductions.over_limit:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction in flight and have its unit take the result, after issuing the gathers that
        others may wait for; do nothing if none is in flight."""
        one = self._reductions.oldest
        if one is not None:
            self._before_reduction(one.number, one.gathers_first)
            self._reductions.finish_oldest()

    def _before_reduction(self, number: int, gathers_first: int) -> None:
        """Do what has to be done before this rank waits for the pass's reduction ``number`` (from 0): issue the first
        ``gathers_first`` gathers of the order, for which other ranks may wait before they start that reduction.

        In lock step, meet the other ranks instead until every one has started it. Do nothing outside a pass.
        """
        if not self._reductions.active:
            return
        if self._lock_step:
            while self._started_by_all <= number:
                self._exchange(-1)
        elif self._active:
            self._gathers.issue_until(gathers_first)

    def _start_before(self, position: int | None) -> None:
        """Start the reductions that must be started before a wait for the gather at ``position`` of the order (None:
        all of the pass), and the last hops of those that take several."""
        while self._reductions.must_start_before(position):
            self.start_next()
        self._reductions.advance_before(position)

    def _exchange(self, gather: int, *, done: bool = False) -> Sequence[LockStep]:
        """Meet the other ranks, issue every gather that any rank needs, and advance the reductions that all ranks have
        started; return the ranks' messages in rank order, equal ones once. Collective; only in lock step.

        ``gather``: position in the pass's order of the gather that this rank needs, -1 for none. ``done``: this rank
        has started all its reductions and needs no gather any more.
        """
        messages = distinct(self._meet(LockStep(gather, self._gathers.issued, self._reductions.started, done)))
        needed = 1 + max(message.gather for message in messages)
        self._gathers.issue_until(needed)
        self._issued_by_all = max(needed, min(message.issued for message in messages))
        self._started_by_all = min(message.started for message in messages)
        self._reductions.advance_first(self._started_by_all)
        return messages
