"""Tell a defect of the script, which happens again at each start, from accidents, which restarts are for."""

from __future__ import annotations

from collections.abc import Sequence

from zero_launch.report import RankFailure

_MOST = 3
_EARLY_SECONDS = 60.0


class RepeatedFailures:
    """Counts attempts in a row that failed alike: the same error from the same place in the same step.

    Signals and lost hosts never count. A rank whose step is not known counts when it failed within the first minute.
    """

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._count = 0

    def count_attempt(self, failures: Sequence[RankFailure], left: int) -> str | None:
        """Count a failed attempt with these ``failures``, first cause first. If it is at least the third in a row that
        failed alike, return a text about why the next would fail too; else None.

        ``left``: the number of restarts that remain, for the text.
        """
        key = _likeness_of(failures[0]) if failures else None
        self._count = self._count + 1 if key is not None and key == self._last else int(key is not None)
        self._last = key
        if self._count < _MOST:
            return None
        where = "" if failures[0].step is None else f" in step {failures[0].step}"
        return (
            f"the same failure {_MOST} times in a row{where}: not started again, as it would happen again "
            f"({left} restart(s) left)"
        )


def _likeness_of(failure: RankFailure) -> tuple[object, ...] | None:
    """Return (cause, traceback or end of stderr, step) of a failure, which are equal for failures that are alike; None
    for a failure that never counts."""
    by_itself = failure.traceback or (failure.exit_code or 0) > 0
    if not by_itself or (failure.step is None and failure.seconds > _EARLY_SECONDS):
        return None
    return failure.cause, failure.detail, failure.step
