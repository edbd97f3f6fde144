"""Reopen an engine after a failure that has ended its process groups."""

from __future__ import annotations

from collections.abc import Sequence

from zero_comm import CommError, EngineGroups

from .gradients import UnitGradients
from .messages import TrainingPosition
from .ordered_reductions import OrderedReductions
from .pass_parts import PassParts
from .passes import Passes


class Reopening:
    """Makes new process groups for a failed engine, once all ranks ask for it, and drops the unfinished step.

    [Note: after a failure of one rank] A rank's weights and states change only inside `Liveness.writing`. A rank that
    fails elsewhere leaves them unchanged, and so do the others, which fail because it has left. All ranks come here,
    meet in the store, and report whether anything is half written and at which step they are. If nothing is, every rank
    has its state from before the step and needs only new process groups. Gathers, reductions, gradients and learned
    orders are dropped, as ranks may have been at different points of the step. Ranks wait for one another for a limited
    time only, as the failed rank's process may have ended.

    ``groups``: the engine's, remade in place. The other arguments are parts of the same engine.
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
        """Make an engine that a failure has ended usable again; do nothing for any other. Collective after a failure.

        ``call``: the engine's method, for messages. Raises `CommError` if the engine cannot continue, or a rank does
        not call this in time; no later call can succeed then.
        """
        liveness, loop = self._parts.liveness, self._parts.loop
        if not liveness.failed:
            return
        if liveness.restart_ruled_out:
            liveness.check()
        cause = liveness.failure
        try:
            own = TrainingPosition(liveness.interrupted, *loop.position())
            told = [TrainingPosition.decode(said) for said in self._groups.meet_again(call, own.encode())]
            _check_intact(told)
            self._groups.reopen()
        except Exception as problem:
            liveness.rule_out_restart(problem)
            self._groups.close()
            raise
        self._drop_unfinished_step(cause)
        loop.go_back(min(one.micro_steps for one in told), min(one.samples for one in told))
        liveness.revive()

    def _drop_unfinished_step(self, cause: str) -> None:
        """Reset gathers, reductions, gradients and learned orders to the state before the step's first forward. Buffers
        and random generators stay as they are, as in plain torch.

        ``cause``: the failure, which errors name until the gradients are zeroed.
        """
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


def _check_intact(told: Sequence[TrainingPosition]) -> None:
    """Raise `CommError` if a rank was interrupted while it wrote weights, or ranks have taken different numbers of
    steps.

    ``told``: every rank's `TrainingPosition`, in rank order, so that all ranks raise the same.
    """
    for rank, one in enumerate(told):
        if one.interrupted is not None:
            raise CommError(
                f"rank {rank} failed while {one.interrupted} was writing weights or states: the ranks have a mixture "
                "of two steps. Make a new engine on every rank and load the last checkpoint."
            )
    if len({one.steps for one in told}) > 1:
        raise CommError(
            f"the ranks have taken different numbers of steps (by rank: {[one.steps for one in told]}). Make a new "
            "engine on every rank and load the last checkpoint."
        )
