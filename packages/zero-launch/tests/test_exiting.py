"""A process that the kernel has begun to end is waited for until its exit status shows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time

import pytest

from zero_launch.processes import await_exiting, exit_status

SYS_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine())
LEAVES = f"""
import ctypes, os, sys, threading
def last():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=last).start()
print("here", flush=True)
ctypes.CDLL(None).syscall({SYS_EXIT}, 0)  # of the main thread alone
"""


@pytest.mark.skipif(SYS_EXIT is None, reason="the number of the system call is not known here")
def test_a_process_that_is_ending_is_waited_for_until_its_status_shows() -> None:
    with subprocess.Popen([sys.executable, "-c", LEAVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline()
        while b") Z" not in open(f"/proc/{process.pid}/stat", "rb").read():
            time.sleep(0.01)
        assert exit_status(process.pid) is None  # though the main thread is over
        threading.Timer(0.2, process.stdin.close).start()
        await_exiting([process.pid])
        assert exit_status(process.pid) == 0


def test_a_process_that_runs_is_not_waited_for() -> None:
    await_exiting([os.getpid()])
