"""Going on after a failure that has ended the engine's process groups."""

from __future__ import annotations

from collections.abc import Sequence

from zero_comm import CommError, EngineGroups

from .gradients import UnitGradients
from .messages import Standing
from .passes import Passes, PassParts
from .reducer import OrderedReductions


class Reopening:
    """Makes the process groups of a failed engine anew, once all ranks ask for it, and drops the step under way.

    [Note: after a failure of one rank] What a rank keeps of the weights and their states changes only inside
    `Liveness.writing`. A rank that fails elsewhere leaves them as they were. So do the others, which fail because
    it has left. All ranks come here, meet in the store, and say that nothing is half written and at which step
    they are. Then every rank has what it had before the step, and new process groups are all that is missing.
    Gathers, reductions, gradients and learned orders of before are dropped, for ranks may have been at different
    places. How long ranks wait for one another is bounded, as the failed rank's process may have ended.
    """

    def __init__(
        self,
        groups: EngineGroups,
        parts: PassParts,
        passes: Passes,
        gradients: Sequence[UnitGradients],
        reductions: OrderedReductions,
    ) -> None:
        self._groups = groups
        self._parts = parts
        self._passes = passes
        self._gradients = list(gradients)
        self._reductions = reductions

    def reopen(self, call: str) -> None:
        """Return when the engine can go on; at once unless a failure has ended it. Collective after one.

        Raises `CommError` where the engine cannot go on, or a rank does not come in time.
        """
        liveness, loop = self._parts.liveness, self._parts.loop
        if not liveness.failed:
            return
        if liveness.ended_for_good:
            liveness.check()
        cause = liveness.failure
        try:
            own = Standing(liveness.interrupted, *loop.position())
            told = [Standing.decode(said) for said in self._groups.meet_again(call, own.encode())]
            _check_intact(told)
            self._groups.reopen()
        except Exception as problem:
            liveness.end_for_good(problem)
            self._groups.close()
            raise
        self._drop_step(cause)
        loop.go_back(min(one.micro_steps for one in told), min(one.samples for one in told))
        liveness.revive()

    def _drop_step(self, cause: str) -> None:
        """Have everything as before the first forward of the step, but for buffers and generators, as in plain
        torch."""
        parts = self._parts
        in_pass = parts.gathers.active
        parts.interleaving.end()
        parts.gradient_watch.end()
        parts.released_use.step_begins()
        self._reductions.reset()
        for unit in parts.units:
            unit.drop_gather(keep_edits=not in_pass)
        parts.gatherer.reset()
        self._passes.forget_pass()
        for gradients in self._gradients:
            gradients.drop_reduction()
        parts.reducer.reset()
        parts.user_gradients.reset()
        parts.agreement.reset()
        parts.reducer.torn = cause


def _check_intact(told: Sequence[Standing]) -> None:
    """Raise `CommError` on every rank where one has half of a step, or ranks have different steps."""
    for rank, one in enumerate(told):
        if one.interrupted is not None:
            raise CommError(
                f"rank {rank} failed while {one.interrupted} was writing weights or states: what the ranks have is of "
                "two steps. Make a new engine on every rank and load the last checkpoint."
            )
    if len({one.steps for one in told}) > 1:
        raise CommError(
            f"the ranks have taken different numbers of steps (by rank: {[one.steps for one in told]}). Make a new "
            "engine on every rank and load the last checkpoint."
        )
