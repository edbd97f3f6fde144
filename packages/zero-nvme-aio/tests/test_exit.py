"""The end of the interpreter while threads are inside native calls."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, threading, time
import zero_nvme_aio as aio
from zero_nvme_aio import _native
from zero_nvme_aio.testing import Delay, faulty_engine
path, what, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
memory = aio.AlignedBuffer(32 << 20)
slow = faulty_engine(Delay(seconds=0.4))
engine = aio.Engine()
def waits():
    with slow.open(path + str(threading.get_ident()), "w") as file:
        slow.write(file, bytes(4096), 0).wait()
def sums():
    while True:
        _native.checksum(memory)
def maps():
    while True:
        aio.AlignedBuffer(32 << 20)
def opens():
    while True:
        with engine.open(path + str(threading.get_ident()), "w") as file:
            engine.write(file, memory, 0).wait()
            engine.sync(file)
            file.size()
for _ in range(3):
    threading.Thread(target=globals()[what], daemon=True).start()
time.sleep(seconds)
sys.exit(3)
"""


def end(path: Path, what: str, seconds: float) -> int:
    """The exit status of a script that ends by `sys.exit(3)` with daemon threads in native calls."""
    command = [sys.executable, "-c", SCRIPT, str(path / "file"), what, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "terminate called" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.parametrize("what", ["waits", "sums", "maps", "opens"])
def test_a_daemon_thread_inside_a_call_leaves_the_exit_status_as_it_is(tmp_path: Path, what: str) -> None:
    assert [end(tmp_path, what, 0.1) for _ in range(2)] == [3, 3]


@pytest.mark.soak
def test_no_exit_of_two_hundred_aborts(tmp_path: Path) -> None:
    kinds = ["waits", "sums", "maps", "opens"]
    counts = collections.Counter(end(tmp_path, kinds[n % 4], 0.05 + n % 7 * 0.01) for n in range(200))
    print(dict(counts))
    assert counts == {3: 200}
