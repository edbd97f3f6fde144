"""Tell the other ranks of a failure inside one of the engine's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from zero_ckpt import CheckpointError
from zero_comm import PeerError
from zero_partition import EditRefusedError, NonFiniteGradientError
from zero_precision import LossScaleError

from .accumulation import Accumulation
from .errors import UsageError
from .state import TrainingState


class Failures:
    """Contexts around what an engine does: what fails on one rank is told to those that could wait for it."""

    def __init__(self, state: TrainingState, accumulation: Accumulation) -> None:
        self._state = state
        self._accumulation = accumulation

    @contextmanager
    def may_be_caught(self, call: str) -> Iterator[None]:
        """A failure that the user may catch: the engine goes on where no other rank can be waiting for this one."""
        try:
            yield
        except BaseException as failure:
            runtime = self._state.partition.runtime
            alone = self._state.model_part.place.size == 1  # else a part's own collectives may be waited for
            if not alone or not runtime.failed_in(call, failure):
                runtime.abort(failure)
                self._state.model_part.abort(failure)
            elif runtime.reducer.torn is not None:
                self._accumulation.restart()
            raise

    @contextmanager
    def told_to_all(self) -> Iterator[None]:
        """A failure of this rank ends the engine on all ranks, each naming it; refusals that all ranks raise together
        do not, nor does what fails where there is no other rank."""
        runtime = self._state.partition.runtime
        try:
            yield
        except (NonFiniteGradientError, LossScaleError, UsageError, EditRefusedError):
            raise
        except CheckpointError as failure:  # raised on every rank, also where one could not be reached any more
            error = PeerError(str(failure))
            cause = self._state.groups.control.explain(error)
            if cause is error:
                raise
            runtime.abort(cause)
            raise cause from failure
        except BaseException as failure:
            if self._state.is_alone:
                raise
            runtime.abort(failure)
            self._state.model_part.abort(failure)
            raise

    def step(self) -> AbstractContextManager[None]:
        """The context of an optimizer step: may be caught where this rank is alone, else told to all."""
        return self.may_be_caught("step") if self._state.is_alone else self.told_to_all()
