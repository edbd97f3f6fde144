"""The end of the interpreter while threads are inside kernels."""

from __future__ import annotations

import collections
import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading, time
import numpy as np
import zero_optim_kernels as zok
def work():
    x = np.ones(1 << {bits}, dtype=np.float32)
    while True:
        zok.l2_norm(x, x.size, dtype="f32", threads={threads})
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep({seconds})
sys.exit(3)
"""


def end(threads: int, bits: int, seconds: float) -> int:
    """The exit status of a script that ends by `sys.exit(3)` with daemon threads in kernels."""
    code = SCRIPT.format(threads=threads, bits=bits, seconds=seconds)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "terminate called" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.parametrize("threads", [1, 2])
def test_a_daemon_thread_inside_a_kernel_leaves_the_exit_status_as_it_is(threads):
    assert [end(threads, 22, 0.1) for _ in range(2)] == [3, 3]


@pytest.mark.soak
def test_no_exit_of_two_hundred_aborts():
    counts = collections.Counter(end(1 + n % 2, 10 + n % 14, 0.05 + n % 7 * 0.01) for n in range(200))
    print(dict(counts))
    assert counts == {3: 200}
