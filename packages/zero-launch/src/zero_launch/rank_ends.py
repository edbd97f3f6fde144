"""How single ranks ended: the failure of one that failed by itself, and a line about any other."""

from __future__ import annotations

from collections.abc import Callable

from zero_launch.rank_files import RankStatus
from zero_launch.report import RankFailure, describe_exit, read_error_file, signal_name, tail


def failure_of(
    record: RankStatus, host: str, started_at: float, step_of: Callable[[int], int | None]
) -> tuple[float, RankFailure] | None:
    """Return (when a rank failed by itself, in seconds since the epoch, and its failure); None if it did not fail by
    itself.

    ``record``: of the rank, after the first failure was noted. ``host``: its name in reports. ``started_at``: when the
    ranks were started (epoch). ``step_of``: returns a rank's optimizer step, None if that is not known.
    """
    if record.left_for is not None:
        return None
    error = read_error_file(record.folder / "error.json") if record.status != 0 else None
    if error is not None:
        when = float(error["extraInfo"]["uncaught_at"])
        cause, detail = str(error["message"]), str(error["extraInfo"]["py_callstack"])
    elif record.failed_with:
        when = record.over_at
        cause, detail = describe_exit(record.failed_with), tail(record.folder / "stderr.log")
    else:
        return None
    code = record.failed_with if error is None else record.status if (record.status or 0) > 0 else None
    step = step_of(record.rank)
    return when, RankFailure(record.rank, host, record.pid, code, cause, detail, when - started_at, step)


def describe_outcome(record: RankStatus) -> str:
    """Return a line about a rank that did not fail by itself: how it ended, or that it still runs."""
    if record.ended_well:
        return f"rank {record.rank} had already ended with exit status 0"
    if record.status is None:
        return f"rank {record.rank} still runs after SIGKILL (pid {record.pid})"
    if record.left_for is not None:
        return f"rank {record.rank} had left, as it was asked to ({record.left_for})"
    how = signal_name(-record.status) if record.status < 0 else f"exit status {record.status}"
    return f"rank {record.rank} was stopped by zero-launch ({how})"
