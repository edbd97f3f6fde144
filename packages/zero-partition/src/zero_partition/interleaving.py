"""Gathers and reductions of one backward pass, which must not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .gatherer import OrderedGathers
from .messages import LockStep
from .reducer import OrderedReductions
from .unit import Unit


class Interleaving:
    """Decides what a rank still has to issue before it may wait.

    [Note: waits] Gathers follow one order and reductions another, and a rank that computes something else than its
    neighbour reaches them at other times: one would wait for a reduction that the other starts only after a gather
    that the first has not issued. So the ranks agree for every reduction how many gathers come first: as many of the
    pass's order as any rank needed before its gradients were complete. A rank that waits for a reduction has issued
    those gathers; a rank that waits for a gather behind them has started that reduction, with the gradients that it has
    (the others follow when the pass is over). Ranks that compute alike never notice.

    A reduction of several hops (`zero_comm.Work.advance`) goes on only while somebody looks after it. So wherever a
    rank has started one for the others' sake, it takes it to its last hop too: all ranks can be relied on to do so.

    How many gathers come first is learned in the first pass. There the ranks go in lock step: before each wait they
    meet and say what they need next, unless they know from the last time that all ranks have issued what this one waits
    for. So they do in every pass where reductions must not start before all gradients are there.

    ``meet``: exchanges one message per rank in lock step, and returns all of them in rank order.
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
        """Begin a backward pass that gathers and reduces."""
        self._active = True
        self._issued_by_all = self._started_by_all = 0
        self._lock_step = self._reductions.complete or not self._reductions.settled

    def leave_lock_step(self) -> None:
        """Return when no rank needs a gather from this one at a certain time any more; all gradients of this rank are
        there and all its reductions started."""
        while self._lock_step and not all(message.done for message in self._exchange(-1, done=True)):
            continue
        self._lock_step = False

    def end(self) -> None:
        """The pass is over: its gathers and reductions have arrived."""
        self._active = self._lock_step = False

    def before_gather(self, unit: Unit) -> None:
        """This rank is about to wait for the gather of ``unit``."""
        if self._lock_step:
            if self._gathers.position(unit) >= self._issued_by_all:
                self._exchange(self._gathers.position(unit))
        elif self._active:
            self._start_within(self._gathers.position(unit))

    def before_request(self) -> None:
        """This rank is about to wait until all ranks have finished the pass, or request something too."""
        if self._active and not self._lock_step:
            self._start_within(None)

    def start_next(self) -> None:
        """Start the next reduction of the pass with the gradients that are there, and make room for it."""
        self._reductions.start_next()
        self._make_room()

    def start_until(self, count: int) -> None:
        """Have started the pass's first ``count`` reductions, with the gradients that are there."""
        while self._reductions.next_unit is not None and self._reductions.started < count:
            self.start_next()

    def reduce_scatter_now(self, units: Iterable[int]) -> None:
        """Reduce ``units`` outside a pass; the same set on every rank."""
        for index in self._reductions.in_order(units):
            self._reductions.start(index)
            self._make_room()
        self.finish_all()

    def finish_all(self) -> None:
        """Wait for every reduction that was started."""
        while self._reductions.oldest is not None:
            self._finish_oldest()

    def _make_room(self) -> None:
        """Have older reductions go on to their last hop while the next unit computes, and no more than is meant to in
        flight."""
        for one in self._reductions.older_in_hops():
            self._before_reduction(one.number, one.gathers_first)
            one.work.advance()
        while self._reductions.crowded:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        one = self._reductions.oldest
        if one is not None:
            self._before_reduction(one.number, one.gathers_first)
            self._reductions.finish_oldest()

    def _before_reduction(self, number: int, gathers_first: int) -> None:
        """This rank is about to wait for the pass's reduction ``number``."""
        if not self._reductions.active:
            return
        if self._lock_step:
            while self._started_by_all <= number:
                self._exchange(-1)
        elif self._active:
            self._gathers.issue_until(gathers_first)

    def _start_within(self, position: int | None) -> None:
        """Start the reductions that come before a wait for the gather at ``position``, and take them to their last
        hop."""
        while self._reductions.must_start_before(position):
            self.start_next()
        self._reductions.advance_before(position)

    def _exchange(self, gather: int, *, done: bool = False) -> Sequence[LockStep]:
        messages = self._meet(LockStep(gather, self._gathers.issued, self._reductions.started, done))
        needed = 1 + max(message.gather for message in messages)
        self._gathers.issue_until(needed)
        self._issued_by_all = max(needed, min(message.issued for message in messages))
        self._started_by_all = min(message.started for message in messages)
        self._reductions.advance_first(self._started_by_all)
        return messages
