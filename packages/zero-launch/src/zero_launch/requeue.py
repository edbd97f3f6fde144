"""A job that is asked to end saves a checkpoint first, and goes back into the scheduler's queue."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from zero_launch.orders import LEFT_STATUS

_SECONDS = 60.0


class LeftEarly(Exception):
    """The job was asked to end, and its ranks have left after saving a checkpoint. ``leads``: this process led it."""

    def __init__(self, *, leads: bool = True) -> None:
        super().__init__()
        self.leads = leads


def requeue(environ: Mapping[str, str]) -> tuple[int, str]:
    """Have Slurm start this job again, where it is Slurm's: the exit status for the launcher, and what to say.

    The status is 75 (EX_TEMPFAIL) also without Slurm, for other schedulers to act upon. Where Slurm refuses it is 1.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return LEFT_STATUS, f"a checkpoint is saved, and the job ends with status {LEFT_STATUS} to be started again"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"a checkpoint is saved, but {' '.join(command)} could not be run: {error}"
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        return 1, f"a checkpoint is saved, but {' '.join(command)} failed: {said}"
    return LEFT_STATUS, f"a checkpoint is saved, and Slurm job {job} is in the queue again"
