"""The guard: a process that ends what is left of a job whose launcher was killed.

Ranks ask the kernel to die with their launcher; processes that ranks start do not. The guard, in a session of its own,
reads a pipe from the launcher. The launcher writes its ranks' pids into it, and `done` at the end of the job. If the
pipe ends without `done`, the launcher was killed, and the guard sends SIGKILL to every process of the job.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time

# A shell waits, because it starts and ends in a millisecond; Python comes when there is something to do.
# A scheduler that signals every process of a job does not end it.
_WATCH = (
    'trap "" HUP INT TERM USR1; pids=; while read -r line; do [ "$line" = done ] && exit; pids="$pids $line"; done; '
    'exec "$@" $pids'
)
_ROUNDS = 3
_ROUND_SECONDS = 0.3


class Guard:
    """The launcher's end of the pipe to the guard process, which starts at once.

    ``job_id``: of the job on this host. ``folder``: what the guard removes when the launcher was killed. ``silent``:
    the guard does not keep this process's standard error open. On a host of several it must not, because there the end
    of standard error tells the launcher that the host was lost.
    """

    def __init__(self, job_id: str, folder: str, *, silent: bool = False) -> None:
        act = [sys.executable, "-c", "from zero_launch.guard import main; main()", job_id, folder]
        command = ["/bin/sh", "-c", _WATCH, "zero-launch-guard", *act]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if silent else None,
            text=True,
            start_new_session=True,
        )

    def watch(self, pids: list[int]) -> None:
        """Tell the guard the pids of the ranks of an attempt, besides those of earlier calls."""
        self._say(" ".join(map(str, pids)))

    def dismiss(self) -> None:
        """End the guard, and wait for it: the job has ended."""
        self._say("done")
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        """Write a line for the guard; do nothing if it has ended."""
        if self._process.stdin is None or self._process.poll() is not None:
            return
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the job itself is well
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def main() -> None:
    """End every process of a job whose launcher was killed, and remove the job's folder: what the guard process runs.

    The command line's words are the job's id, the folder and the ranks' pids.
    """
    job_id, folder, *pids = sys.argv[1:]
    from zero_launch.processes import end_job

    # A rank may have been starting something at the moment when it died.
    for _ in range(_ROUNDS):
        end_job(job_id, set(map(int, pids)), grace_seconds=0.0)
        time.sleep(_ROUND_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
