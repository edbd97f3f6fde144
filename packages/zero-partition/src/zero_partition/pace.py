"""Gathers and reductions of one backward pass that must not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .gatherer import Gatherer
from .reducer import Reducer
from .unit import Unit


class Pace:
    """Decides what a rank still has to issue before it may wait.

    [Note: waits] Gathers follow one order and reductions another, and a rank that computes something else than its
    neighbour reaches them at other times: one would wait for a reduction that the other starts only after a gather
    that the first has not issued. So every reduction has a *gate*, agreed by all ranks: how many gathers of the pass's
    order any rank needed before its gradients were complete. Whoever waits for a reduction has issued the gathers up
    to its gate; whoever waits for a gather behind a gate has started that reduction, with the gradients that it has
    (the others follow when the pass is over). Ranks that compute alike never notice.

    A reduction of several hops (`zero_comm.Work.advance`) goes on only while somebody looks after it. So wherever a
    rank has started one for the others' sake, it takes it to its last hop too: all ranks can be relied on to do so.

    The gates are learned in the first pass. There the ranks go in lock step: before each wait they meet and say what
    they need next. So they do in every pass where reductions must not start before all gradients are there.
    """

    def __init__(self, gatherer: Gatherer, reducer: Reducer, meet: Callable[[Any], list[Any]]) -> None:
        self._gatherer = gatherer
        self._reducer = reducer
        self._meet = meet
        self._active = False
        self._lock_step = False
        gatherer.before_wait = self.before_gathered
        gatherer.before_request = self.before_request
        reducer.before_wait = self.before_reduced
        reducer.gather_order = lambda: gatherer.order

    def begin(self) -> None:
        """A backward pass begins that gathers and reduces."""
        self._active = True
        self._lock_step = self._reducer.complete or not self._reducer.settled

    def end(self) -> None:
        """All gradients of this rank are there and all its reductions started; returns when no rank needs a gather
        from this one at a certain time any more."""
        while self._lock_step and not all(done for _, _, done in self._exchange(-1, done=True)):
            continue
        self._lock_step = False

    def stop(self) -> None:
        """The pass is over: its gathers and reductions have arrived."""
        self._active = self._lock_step = False

    def before_gathered(self, unit: Unit) -> None:
        """This rank is about to wait for the gather of ``unit``."""
        position = self._gatherer.position(unit)
        if self._lock_step:
            self._exchange(position)
        elif self._active:
            self._give_way(position)

    def before_request(self) -> None:
        """This rank is about to wait until all ranks have finished the pass, or ask for something too."""
        if self._active and not self._lock_step:
            self._give_way(None)

    def before_reduced(self, number: int, gate: int) -> None:
        """This rank is about to wait for the pass's reduction ``number``."""
        if self._lock_step:
            while min(started for _, started, _ in self._exchange(-1)) <= number:
                continue
        elif self._active:
            self._gatherer.issue_until(gate)

    def _give_way(self, position: int | None) -> None:
        self._reducer.give_way(position)
        self._reducer.take_far(position)

    def _exchange(self, position: int, *, done: bool = False) -> Sequence[Any]:
        answers = self._meet([position, self._reducer.started, done])
        self._gatherer.issue_until(1 + max(wanted for wanted, _, _ in answers))
        self._reducer.take_far_started(min(started for _, started, _ in answers))
        return answers
