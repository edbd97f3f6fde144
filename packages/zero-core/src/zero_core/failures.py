"""Contexts that abort the other ranks when one of the engine's calls fails on this one."""

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
    """Contexts around an engine's calls. If the call fails on this rank, a context decides which other ranks fail too.
    To abort a rank is to make its collectives raise, with the cause."""

    def __init__(self, state: TrainingState, accumulation: Accumulation) -> None:
        self._state = state
        self._accumulation = accumulation

    @contextmanager
    def may_be_caught(self, call: str, *, awaited: bool = False) -> Iterator[None]:
        """If the block fails, abort all ranks unless none can be waiting for this one: the user may then catch the
        exception and continue, with a new accumulation if backward was cut short. ``call``: the engine's call, for
        messages. ``awaited``: others wait for this rank during the call in any case."""
        try:
            yield
        except BaseException as failure:
            runtime = self._state.partition.runtime
            alone = self._state.model_part.place.size == 1  # else a part's own collectives may be waited for
            if not alone or not runtime.failed_in(call, failure, awaited=awaited):
                self._state.model_part.abort(failure)
                runtime.abort(failure)  # which may wait for an update
            elif runtime.reducer.torn is not None:
                self._accumulation.restart()
            raise

    @contextmanager
    def abort_all_on_failure(self) -> Iterator[None]:
        """If the block fails on this rank, abort all ranks, unless all ranks raise the error together or this rank has
        no others to abort (`TrainingState.is_alone`)."""
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
            self._state.model_part.abort(cause)
            runtime.abort(cause)
            raise cause from failure
        except BaseException as failure:
            if self._state.is_alone:
                raise
            self._state.model_part.abort(failure)
            runtime.abort(failure)  # which may wait for an update
            raise

    def step(self) -> AbstractContextManager[None]:
        """Return the context for an optimizer step: `may_be_caught` if a failure affects this rank only, else
        `abort_all_on_failure`."""
        return self.may_be_caught("step") if self._state.is_alone else self.abort_all_on_failure()
