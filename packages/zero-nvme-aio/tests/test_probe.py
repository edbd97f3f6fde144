"""probe tells the truth, and "auto" does what it says."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero_nvme_aio as aio

# Forbids system calls by number, as a container's seccomp profile does, then reports.
FORBIDDEN = """
import ctypes, json, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def forbid(numbers, error):
    load = struct.pack("HBBI", 0x20, 0, 0, 0)
    tests = b"".join(
        struct.pack("HBBI", 0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)
    )
    allow = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    deny = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error)
    code = load + tests + allow + deny
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()

forbid(json.loads(sys.argv[1]), int(sys.argv[2]))
import zero_nvme_aio as aio
probe = aio.probe()
with aio.Engine() as io, io.open(sys.argv[3], "rw") as file:
    io.write(file, b"x" * 100_000, 3).wait()
    out = bytearray(100_000)
    io.read(file, out, 3).wait()
    assert out == b"x" * 100_000
from zero_nvme_aio import _tuning
_tuning.remember(sys.argv[3], _tuning.Tuning("io_uring", 65536, 4, 1, 1.0, 1.0))
with aio.Engine.for_path(sys.argv[3]) as io:
    assert (io.backend, io.block_bytes) == (probe.chosen, 65536)
print(json.dumps([probe.chosen, io.backend, {s.name: [s.available, s.reason, s.errno] for s in probe.backends},
    probe.registered_note]))
"""
IO_URING_SETUP, IO_URING_REGISTER, IO_SETUP = 425, 427, 206
X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="system call numbers of x86-64")


def forbidden(folder: Path, numbers: list[int], error: int) -> list[Any]:
    command = [sys.executable, "-c", FORBIDDEN, json.dumps(numbers), str(error), str(folder / "f")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_probe_names_every_backend_and_chooses_the_first_that_runs() -> None:
    probe = aio.probe()
    assert [status.name for status in probe.backends] == ["io_uring", "libaio", "threads"]
    assert probe.chosen == next(status.name for status in probe.backends if status.available)
    for status in probe.backends:
        assert status.available == (status.reason == "") == (status.errno == 0)
        assert status.name in probe.explain()
    with aio.Engine() as io:
        assert io.backend == probe.chosen


@X86_64
@pytest.mark.parametrize(
    ("numbers", "error", "chosen", "words"),
    [
        ([IO_URING_SETUP], 1, "libaio", {"io_uring": "seccomp"}),
        ([IO_URING_SETUP], 38, "libaio", {"io_uring": "no io_uring"}),
        ([IO_URING_SETUP], 12, "libaio", {"io_uring": "locked-memory limit"}),
        ([IO_URING_SETUP, IO_SETUP], 1, "threads", {"io_uring": "seccomp", "libaio": "seccomp"}),
    ],
)
def test_where_a_system_call_is_refused_the_next_backend_runs_and_probe_says_why(
    tmp_path: Path, numbers: list[int], error: int, chosen: str, words: dict[str, str]
) -> None:
    probe_chosen, engine_backend, backends, _ = forbidden(tmp_path, numbers, error)
    assert probe_chosen == engine_backend == chosen
    for name, word in words.items():
        available, reason, code = backends[name]
        assert not available
        assert word in reason
        assert code == error


@X86_64
def test_where_no_memory_may_be_registered_staging_runs_without_and_probe_says_so(tmp_path: Path) -> None:
    if not aio.probe().backends[0].available:
        pytest.skip(aio.probe().backends[0].reason)
    chosen, backend, _, note = forbidden(tmp_path, [IO_URING_REGISTER], 12)
    assert chosen == backend == "io_uring"
    assert "registers no buffers" in note
    assert "ulimit -l" in note


def test_probe_says_what_may_be_registered_and_when_engines_hold_it(tmp_path: Path) -> None:
    if not aio.probe().backends[0].available:
        pytest.skip(aio.probe().backends[0].reason)
    gc.collect()  # engines that earlier tests have dropped
    assert "can be registered" in aio.probe().registered_note
    with aio.Engine() as io, io.open(tmp_path / "f", "rw") as file:
        if not file.direct:
            pytest.skip(file.direct_reason)
        io.write(file, memoryview(bytearray((32 << 20) + 1))[1:], 0).wait()
        assert "in use by engines of this process" in aio.probe().registered_note
