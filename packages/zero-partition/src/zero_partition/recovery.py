"""What becomes of a pass that fails: the engine goes on where no other rank waits for this one."""

from __future__ import annotations

import logging
from typing import Any

from zero_comm import CommError, EngineGroups

from .gatherer import Gatherer
from .pace import Pace
from .reducer import Reducer

logger = logging.getLogger("zero_partition")

PATIENCE = 3.0  # seconds that a rank whose pass failed waits for the others to have failed in it too


class Recovery:
    """Ends a pass that failed, so that the next one finds everything as before it.

    [Note: caught failures] A failure ends the engine only where other ranks may wait for what this rank will not send.
    With one rank, or no pass open that communicates, there are none. With a pass open, the ranks meet once: when all
    have failed in the same call, each issues the gathers and reductions that another has issued already, so that the
    channels are at one place again on all of them, and drops what came of it.
    """

    def __init__(self, groups: EngineGroups, gatherer: Gatherer, reducer: Reducer, pace: Pace) -> None:
        self._groups = groups
        self._gatherer = gatherer
        self._reducer = reducer
        self._pace = pace

    def leave_pass(self, call: str, step: int, failure: BaseException, *, awaited: bool) -> bool:
        """End the open pass after ``failure`` in ``call``; whether the engine can go on.

        ``awaited``: others wait for this rank though no pass is open.
        """
        if isinstance(failure, CommError):
            return False
        waited_for = self._groups.control.world_size > 1 and (awaited or self._gatherer.active or self._reducer.active)
        if waited_for and not (isinstance(failure, Exception) and self._is_shared(call, step, failure)):
            return False
        self._pace.stop()
        self._reducer.abandon()
        self._gatherer.abandon()
        return True

    def _is_shared(self, call: str, step: int, failure: BaseException) -> bool:
        """Whether all ranks failed in ``call``; then their channels are at one place."""
        told = self._confer(call, step, failure, [self._gatherer.issued, self._reducer.started])
        if told is None:
            return False
        self._pace.stop()
        self._gatherer.issue_until(max(gathers for gathers, _ in told))
        self._reducer.start_until(max(reductions for _, reductions in told))
        issued = self._confer(call, step, failure, self._groups.issued())
        return issued is not None and all(counts == issued[0] for counts in issued)

    def _confer(self, call: str, step: int, failure: BaseException, payload: Any) -> list[Any] | None:
        reason = f"{type(failure).__name__}: {failure} (in step {step})"
        return self._groups.control.confer(call, step, reason, payload, PATIENCE)


def advise(failure: BaseException, *, torn: bool) -> None:
    """Add to what a traceback of ``failure`` prints how the user can go on; before Python 3.11 it is logged."""
    words = "the engine goes on, with the next forward; gradients and weights are as before this call"
    if torn:
        words = "the engine goes on: call engine.zero_grad(), which starts the accumulation anew, then the next batch"
    if hasattr(failure, "add_note"):
        failure.add_note(words)
    else:
        logger.warning("after %s: %s", type(failure).__name__, words)
