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
    """Contexts around an engine's calls, which decide which ranks fail when this rank fails inside."""

    def __init__(self, state: TrainingState, accumulation: Accumulation) -> None:
        self._state = state
        self._accumulation = accumulation

    @contextmanager
    def may_be_caught(self, call: str, *, awaited: bool = False) -> Iterator[None]:
        """If the block fails, abort all ranks, unless none can be waiting for this one, as with ``awaited`` others are:
        then the user may catch the exception and continue; a backward pass that was cut short restarts the
        accumulation. ``call``: for messages."""
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
        """If the block fails on this rank, abort the engine on all ranks, each naming the cause; not for errors that
        all ranks raise together, nor if this rank `TrainingState.is_alone`."""
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
            self._state.model_part.abort(failure)
            runtime.abort(failure)  # which may wait for an update
            raise

    def step(self) -> AbstractContextManager[None]:
        """Return a step's context: `may_be_caught` if it concerns this rank only, else `abort_all_on_failure`."""
        return self.may_be_caught("step") if self._state.is_alone else self.abort_all_on_failure()
