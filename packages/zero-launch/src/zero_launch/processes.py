"""Find every process of a job, and end them all.

[Note: What belongs to a job]
A rank is started as the leader of a session of its own, with the job's id in its environment. What it starts inherits
both, and either is enough: a helper that was given a clean environment is still in the session, and one that made its
own session still carries the id. Parenthood is no criterion, because it ends with the parent. Only a process that
sheds both, a daemon on purpose, is out of reach. The id is that of the job on this host: several "hosts" may be one
machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

JOB_VARIABLE = "ZERO_LAUNCH_JOB"
LAUNCHER_PID_VARIABLE = "ZERO_LAUNCH_PID"
CORES_VARIABLE = "ZERO_LAUNCH_CORES"
REQUEUE_VARIABLE = "ZERO_LAUNCH_REQUEUE"
END_FILE = "end.json"
"""Where a rank writes that its script is over, in the folder of its error file."""
_POLL_SECONDS = 0.02
_HELPER_SECONDS = 0.5
_KILL_SECONDS = 2.0
_FLAGS, _THREADS, _EXIT_CODE = 5, 16, 48
"""Fields 9, 20 and 52 of `/proc/PID/stat`, counted from the one after the state."""
_EXITING = 0x4
"""Among the flags: the kernel has begun to end the process (PF_EXITING)."""
_EXITING_SECONDS = 2.0


def exit_status(pid: int) -> int | None:
    """Return the exit status of a child that has ended and is not reaped (a signal is negative); None while it runs.

    The child stays a zombie, so that torch's agent still gets its status. Raises ChildProcessError when ``pid`` is no
    child of this process, or is reaped already.
    """
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def ended_status(pid: int) -> int | None:
    """Return the exit status of another process's child that has ended and is not reaped (a signal is negative); None
    while any of its threads runs; -9 when there is no such process.

    The child disappears, and its pid may be reused, only once its parent has reaped it or has ended.
    """
    try:
        state, *fields = _stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return -signal.SIGKILL
    threads, status = int(fields[_THREADS]), int(fields[_EXIT_CODE])
    return os.waitstatus_to_exitcode(status) if state in "ZX" and threads <= 1 else None


def await_exiting(pids: Collection[int]) -> None:
    """Wait until those of ``pids`` that the kernel has begun to end have an exit status, 2 s at most. The kernel closes
    a process's connections, at which other ranks fail, some time before it shows the exit status."""
    end = time.monotonic() + _EXITING_SECONDS
    while any(map(_is_exiting, pids)) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def _is_exiting(pid: int) -> bool:
    """Return whether the kernel has begun to end the process ``pid``, which has no exit status yet; False if there is
    none."""
    try:
        return ended_status(pid) is None and bool(int(_stat_of(pid)[1 + _FLAGS]) & _EXITING)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _stat_of(pid: int) -> list[str]:
    """Return the state of a process and the fields of `/proc/PID/stat` after it. Raises FileNotFoundError or
    ProcessLookupError when there is no such process."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def job_processes(job_id: str, rank_pids: Collection[int], spared: Collection[int] = ()) -> list[psutil.Process]:
    """Return the running processes of a job, ranks first; see [Note: What belongs to a job].

    ``job_id``: of the job on this host. ``rank_pids``: the pids of its ranks, in whose sessions to look too.
    ``spared``: pids to leave out; this process always is, and so are other users' processes.
    """
    import psutil

    found = []
    me = os.getpid()
    for process in psutil.process_iter():
        if process.pid == me or process.pid in spared:
            continue
        try:
            if ended_status(process.pid) is not None:
                continue
            inside = process.pid in rank_pids or os.getsid(process.pid) in rank_pids
            if inside or process.environ().get(JOB_VARIABLE) == job_id:
                found.append(process)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or it is another user's and so none of ours
    return sorted(found, key=lambda process: process.pid not in rank_pids)


def end_job(
    job_id: str,
    rank_pids: Collection[int],
    *,
    signum: int = signal.SIGTERM,
    grace_seconds: float,
    spared: Collection[int] = (),
) -> list[tuple[int, str]]:
    """End every process of a job; return those that needed SIGKILL, as (pid, text that says what happened).

    ``job_id``: of the job on this host. ``rank_pids``: the pids of its ranks. ``spared``: pids to leave alone. The
    ranks get ``signum``. Half a second before ``grace_seconds`` are over, or as soon as all processes have ended, the
    job's other processes get SIGTERM. Processes that then still run get SIGKILL, and 2 s to be gone. Returns at once
    when nothing runs.
    """
    alive = job_processes(job_id, rank_pids, spared)
    for process in alive:
        if process.pid in rank_pids:
            _send_signal(process, signum)
    _wait_until_ended(alive, max(0.0, grace_seconds - _HELPER_SECONDS))
    helpers = [process for process in job_processes(job_id, rank_pids, spared) if process.pid not in rank_pids]
    for process in helpers:
        _send_signal(process, signal.SIGTERM)
    _wait_until_ended(job_processes(job_id, rank_pids, spared), min(_HELPER_SECONDS, grace_seconds))
    report = []
    survivors = job_processes(job_id, rank_pids, spared)
    names = {process.pid: _program_name(process) for process in survivors}
    for process in survivors:
        _send_signal(process, signal.SIGKILL)
    unkillable = {process.pid for process in _wait_until_ended(survivors, _KILL_SECONDS)}
    for process in survivors:
        fate = "still runs after SIGKILL" if process.pid in unkillable else "had to be killed"
        report.append((process.pid, f"{names[process.pid]} (pid {process.pid}) {fate}"))
    return report


def kill_those_ignoring(pids: Collection[int], signum: int) -> None:
    """Send SIGKILL to the processes that ignore ``signum``, because they would not end on
    it; skip those that have ended."""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
                ignored = next((line.split()[1] for line in file if line.startswith("SigIgn:")), "0")
            if int(ignored, 16) >> (signum - 1) & 1:
                os.kill(pid, signal.SIGKILL)


def wait_for_helpers(
    job_id: str, rank_pids: Collection[int], *, grace_seconds: float, spared: Collection[int] = ()
) -> None:
    """Wait up to ``grace_seconds`` for the job's remaining processes to end by themselves. ``job_id``: of the job on
    this host. ``rank_pids``: the pids of its ranks. ``spared``: pids not to wait for."""
    _wait_until_ended(job_processes(job_id, rank_pids, spared), grace_seconds)


def _wait_until_ended(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all processes have ended, at most ``seconds``; return those that still run."""
    end = time.monotonic() + seconds
    while True:
        # what has ended but is not reaped still exists; a rank does until the engine reaps it
        processes = [p for p in processes if p.is_running() and ended_status(p.pid) is None]
        if not processes or time.monotonic() >= end:
            return processes
        time.sleep(_POLL_SECONDS)


def _program_name(process: psutil.Process) -> str:
    """Return the program name of a process, for reports; "process" if it is gone."""
    import psutil

    try:
        return str(process.name())
    except psutil.Error:
        return "process"


def _send_signal(process: psutil.Process, signum: int) -> None:
    """Send a signal to a process; do nothing if it has ended."""
    import psutil

    try:
        process.send_signal(signum)
    except psutil.NoSuchProcess:
        return  # it ended on its own
