"""Recover from a failed pass, so that the engine can continue if no other rank waits for this one."""

from __future__ import annotations

import logging
from typing import Any

from zero_comm import CommError, EngineGroups

from .gatherer import Gatherer
from .interleaving import Interleaving
from .messages import PassProgress, StepNumber
from .ordered_gathers import OrderedGathers
from .ordered_reductions import OrderedReductions
from .reducer import Reducer

logger = logging.getLogger("zero_partition")

PATIENCE = 3.0  # seconds that a rank whose pass failed waits for the others to report the same


class Recovery:
    """Ends a pass that failed, so that the next one starts from the same state as the failed one did.

    [Note: caught failures] A failure ends the engine only if other ranks may wait for data that this rank will not
    send. With one rank, or without an open pass that communicates, there are none. With an open pass, the ranks meet
    once. If all have failed in the same call, each issues the gathers and reductions that any other has issued, so that
    all ranks have issued the same collectives, and drops the results.

    ``groups``: the process groups. ``step``: number of the step, for messages. The other arguments are parts of the
    same engine. In all methods ``call`` is the engine's call that failed ("forward", "backward", "step" or a method's
    name) and ``failure`` the exception.
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

    def abandon_pass(self, call: str, failure: BaseException, *, awaited: bool) -> bool:
        """End the open pass, if there is one, as ``call`` has failed; return whether the engine can continue.

        It cannot, and the pass stays open, after a failure of communication, and where other ranks may wait for this
        one: they did not fail alike within a few seconds, or ``failure`` is no `Exception`. If all ranks failed alike,
        this one first issues the gathers and reductions that others have issued and it has not. ``awaited``: other
        ranks wait for this one even if no pass is open.
        """
        if isinstance(failure, CommError) or self._groups.control.is_torn:
            return False
        in_pass = self._gathers.active or self._reductions.active
        waited_for = self._groups.control.world_size > 1 and (awaited or in_pass)
        if waited_for and not (isinstance(failure, Exception) and self._all_failed_alike(call, failure)):
            return False
        self._interleaving.end()
        self._reducer.abandon()
        self._gatherer.abandon()
        return True

    def announce_failure(self, call: str, failure: BaseException) -> None:
        """Record ``failure`` as the reason that other ranks give if they wait for this one and it never calls the
        engine again."""
        self._groups.control.record_failed_call(failure, f"in {call} of step {self._step.value}")

    def _all_failed_alike(self, call: str, failure: BaseException) -> bool:
        """Meet the other ranks; return whether all failed in ``call`` and have issued the same collectives then. For
        this, the rank issues the gathers and reductions that it lacks. Waits `PATIENCE` seconds at most for each of two
        meetings, and between them without a limit for what it issues itself."""
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
        """Return every rank's ``payload`` (plain data), in rank order, if all ranks fail in ``call`` within `PATIENCE`
        seconds of this call. Else return None: the groups are then of no more use, and this rank has to abort. Ranks
        that are elsewhere get ``failure`` as their error. Collective among ranks that fail."""
        return self._groups.control.confer(call, self._step.value, failure, payload, PATIENCE)


def add_advice(failure: BaseException, *, torn: bool, half_written: str | None) -> None:
    """Add a note to ``failure`` that says how the user can continue; before Python 3.11 log the note instead.

    ``torn``: the gradients hold only a part of a failed backward pass. ``half_written``: words for the update that was
    interrupted and has left weights and states of two steps; None if there was none.
    """
    words = "the engine continues, with the next forward; gradients and weights are as before this call"
    if torn:
        words = "the engine continues: call engine.zero_grad(), which restarts the accumulation, then the next batch"
    if half_written is not None:
        words = f"{half_written} has left weights and states of two steps: call engine.load_checkpoint(...)"
    if hasattr(failure, "add_note"):
        failure.add_note(words)
    else:
        logger.warning("after %s: %s", type(failure).__name__, words)
