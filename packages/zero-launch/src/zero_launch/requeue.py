"""A job that is asked to end saves a checkpoint first, and goes back into the scheduler's queue.

[Note: requeue signals] Slurm's signals may come on several ways at once: to every process of the job, and once more by
`srun` or a shell that passes them on. So the launcher and its agents on the hosts act upon them; ranks, standbys and
the programs that carry the connections ignore them; and a SIGTERM soon after the first is the same one. Before the
launcher can act, and while it puts the job back into the queue, signals wait (`hold`).
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Literal

from zero_launch.orders import LEFT_STATUS

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""The signals that ask a job with `--requeue` to end."""
_SECONDS = 60.0
_SAME_SECONDS = 5.0


def hold() -> None:
    """Block `SIGNALS` in this thread until `release`; those that come meanwhile stay pending. Call it on the main
    thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def release() -> None:
    """Unblock `SIGNALS` in this thread; pending ones are delivered at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class Requests:
    """Decides what each signal to a `--requeue` job means, in the order in which they come; see [Note: requeue
    signals]. ``clock``: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at: float | None = None

    def hear(self, signum: int) -> Literal["ask", "same", "now"]:
        """Return the meaning of a signal: `ask` to save and end (the first), the `same` request again, which changes
        nothing, or end `now`.

        A SIGTERM means `now` from 5 s after the first signal on; a later SIGUSR1 never does.
        """
        if self._asked_at is None:
            self._asked_at = self._clock()
            return "ask"
        soon = self._clock() - self._asked_at < _SAME_SECONDS
        return "same" if soon or signum != signal.SIGTERM else "now"


class LeftEarly(Exception):
    """The job was asked to end, and its ranks have left after saving a checkpoint. ``leads``: this process led it."""

    def __init__(self, *, leads: bool = True) -> None:
        super().__init__()
        self.leads = leads


def requeue(environ: Mapping[str, str], *, saved: bool = True) -> tuple[int, str]:
    """Put this job back into Slurm's queue, if it is Slurm's; return the launcher's exit status and a text to print.

    ``environ``: SLURM_JOB_ID there names the job. The status is 75 (EX_TEMPFAIL), without Slurm too, for other
    schedulers to act upon; it is 1 where Slurm refuses. ``saved``: all ranks have saved a checkpoint and left. Call it
    from the main thread; from here on this process ignores `SIGNALS`.
    """
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    what = "a checkpoint is saved" if saved else "the job ended before its ranks had saved, and has its last checkpoint"
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return LEFT_STATUS, f"{what}; it ends with status {LEFT_STATUS} to be started again"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{what}, but {' '.join(command)} could not be run: {error}"
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        return 1, f"{what}, but {' '.join(command)} failed: {said}"
    return LEFT_STATUS, f"{what}; Slurm job {job} is in the queue again"
