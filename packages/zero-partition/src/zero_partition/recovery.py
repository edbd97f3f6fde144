"""Recover from a pass that fails: the engine goes on where no other rank waits for this one."""

from __future__ import annotations

import logging
from typing import Any

from zero_comm import CommError, EngineGroups

from .gatherer import Gatherer, OrderedGathers
from .interleaving import Interleaving
from .messages import PassProgress, StepNumber
from .reducer import OrderedReductions, Reducer

logger = logging.getLogger("zero_partition")

PATIENCE = 3.0  # seconds that a rank whose pass failed waits for the others to have failed in it too


class Recovery:
    """Ends a pass that failed, so that the next one finds everything as before it.

    [Note: caught failures] A failure ends the engine only where other ranks may wait for what this rank will not send.
    With one rank, or no pass open that communicates, there are none. With a pass open, the ranks meet once: when all
    have failed in the same call, each issues the gathers and reductions that another has issued already, so that the
    process groups are at one place again on all of them, and drops what came of it.
    """

    def __init__(
        self,
        groups: EngineGroups,
        step: StepNumber,
        gathers: OrderedGathers,
        reductions: OrderedReductions,
        interleaving: Interleaving,
        gatherer: Gatherer,
        reducer: Reducer,
    ) -> None:
        self._groups = groups
        self._step = step
        self._gathers = gathers
        self._reductions = reductions
        self._interleaving = interleaving
        self._gatherer = gatherer
        self._reducer = reducer

    def leave_pass(self, call: str, failure: BaseException, *, awaited: bool) -> bool:
        """End the open pass after ``failure`` in ``call``; return whether the engine can go on.

        ``awaited``: others wait for this rank though no pass is open.
        """
        if isinstance(failure, CommError) or self._groups.control.is_torn:
            return False
        in_pass = self._gathers.active or self._reductions.active
        waited_for = self._groups.control.world_size > 1 and (awaited or in_pass)
        if waited_for and not (isinstance(failure, Exception) and self._is_shared(call, failure)):
            return False
        self._interleaving.end()
        self._reducer.abandon()
        self._gatherer.abandon()
        return True

    def tell(self, call: str, failure: BaseException) -> None:
        """Leave word of ``failure`` for the ranks that will wait for this one, should it make no further call."""
        self._groups.control.failed(f"{_describe(failure)} (in {call} of step {self._step.value})")

    def _is_shared(self, call: str, failure: BaseException) -> bool:
        """Return whether all ranks failed in ``call``; then their process groups are at one place."""
        answers = self._confer(call, failure, PassProgress(self._gathers.issued, self._reductions.started).encode())
        if answers is None:
            return False
        progress = [PassProgress.decode(answer) for answer in answers]
        self._interleaving.end()
        self._gathers.issue_until(max(one.gathers for one in progress))
        self._interleaving.start_until(max(one.reductions for one in progress))
        issued = self._confer(call, failure, self._groups.issued())
        return issued is not None and all(counts == issued[0] for counts in issued)

    def _confer(self, call: str, failure: BaseException, payload: Any) -> list[Any] | None:
        reason = f"{_describe(failure)} (in step {self._step.value})"
        return self._groups.control.confer(call, self._step.value, reason, payload, PATIENCE)


def advise(failure: BaseException, *, torn: bool) -> None:
    """Add to what a traceback of ``failure`` prints how the user can go on; before Python 3.11 it is logged."""
    words = "the engine goes on, with the next forward; gradients and weights are as before this call"
    if torn:
        words = "the engine goes on: call engine.zero_grad(), which starts the accumulation anew, then the next batch"
    if hasattr(failure, "add_note"):
        failure.add_note(words)
    else:
        logger.warning("after %s: %s", type(failure).__name__, words)


def _describe(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {failure}"
