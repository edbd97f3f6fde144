"""Running processes of a job: which are counted, and which `end_job` leaves."""

from __future__ import annotations

import signal
import subprocess
import sys

from zero_launch.processes import end_job, exit_status

WITHOUT_ITS_FIRST_THREAD = """
import ctypes, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(60,)).start()
print("begun", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_runs_until_the_others_have():
    command = [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        while not _first_thread_ended(process.pid):
            pass
        ended = end_job("none", {process.pid}, grace_seconds=0.2)
        status = exit_status(process.pid)
        process.kill()
    assert [pid for pid, _ in ended] == [process.pid]
    assert status == -signal.SIGKILL


def _first_thread_ended(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
