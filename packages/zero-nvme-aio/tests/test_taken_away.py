"""What a request needs is taken away while it runs: the tensor's memory, or the engine's system calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zero_nvme_aio import probe

BACKENDS = ["io_uring", "libaio", "threads"]

RESIZE = """
import sys, torch, zero_nvme_aio as aio
from zero_nvme_aio import errors
backend, path, kind, checksum = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "hashed"
refused = 0
with aio.Engine(backend=backend, queue_depth=2, block_bytes=65536) as engine, engine.open(path, "rw") as file:
    engine.write(file, bytes(64 << 20), 0).wait()
    for offset in (0, 1):  # without and with staging
        for _ in range(3):
            tensor = torch.ones(48 << 20, dtype=torch.uint8)
            act = engine.write if kind == "write" else engine.read
            request = act(file, tensor, offset, checksum=checksum)
            tensor.untyped_storage().resize_(0)
            try:
                request.wait()
            except errors.InvalidBufferError as error:
                assert "was resized or replaced during the " + kind in str(error), error
                refused += 1
    tensor = torch.arange(1 << 20, dtype=torch.int32)
    assert engine.write(file, tensor, 1, checksum=True).wait() == 4 << 20
    back = torch.empty_like(tensor)
    engine.read(file, back, 1, checksum=True).wait()
    assert torch.equal(back, tensor)
    tensor.untyped_storage().resize_(0)  # after the request the memory is the user's again
print(refused)
"""

REFUSE = """
import ctypes, errno, struct, sys
import zero_nvme_aio as aio
from zero_nvme_aio import errors
NUMBERS = {"io_uring_enter": 426, "io_getevents": 208, "io_submit": 209}
def refuse(name):
    libc = ctypes.CDLL(None, use_errno=True)
    code = struct.pack("=HBBI", 0x20, 0, 0, 0)  # load the number of the system call
    code += struct.pack("=HBBI", 0x15, 0, 1, NUMBERS[name])
    code += struct.pack("=HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM)
    code += struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    program = ctypes.create_string_buffer(code)
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    libc.prctl(38, 1, 0, 0, 0)
    filter = Filter(4, ctypes.addressof(program))
    if libc.syscall(317, 1, 1, ctypes.byref(filter)) != 0:  # for all threads
        print("no filter")
        sys.exit(0)
backend, path, call, when = sys.argv[1:]
if when == "before":
    refuse(call)
    with aio.Engine() as engine, engine.open(path, "rw") as file:
        assert engine.backend != backend, engine.backend
        engine.write(file, bytes(1 << 20), 0).wait()
    try:
        aio.Engine(backend=backend)
    except errors.BackendUnavailableError as error:
        print(error)
    sys.exit(0)
with aio.Engine(backend=backend, queue_depth=4, block_bytes=65536) as engine, engine.open(path, "rw") as file:
    engine.write(file, bytes(1 << 20), 0).wait()
    going = engine.write(file, bytes(64 << 20), 0)
    refuse(call)
    told = 0
    for request in (going, engine.write(file, bytes(1 << 20), 0), engine.read(file, bytearray(1 << 20), 0)):
        try:
            request.wait(30)
        except errors.WaitTimeoutError:
            raise
        except errors.AioError as error:
            assert "Operation not permitted" in str(error) and "backend='threads'" in str(error), error
            told += 1
    assert told >= 2, told
print("named")
"""

# Refuses every write of 8 bytes, which is what wakes a sleeper on an eventfd.
UNHEARD = """
import asyncio, ctypes, errno, struct, sys, time
import zero_nvme_aio as aio
def refuse_to_ring():
    steps = [(0x20, 0, 0, 0), (0x15, 0, 3, 1), (0x20, 0, 0, 32), (0x15, 0, 1, 8)]  # write(2), its length, 8
    steps += [(0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    filter = Filter(len(steps), ctypes.addressof(program))
    if libc.syscall(317, 1, 1, ctypes.byref(filter)) != 0:  # for all threads
        print("no filter")
        sys.exit(0)
backend, path = sys.argv[1:]
data = bytes(range(256)) * 4096
with aio.Engine(backend=backend) as engine:
    with engine.open(path, "rw") as file:
        engine.write(file, bytes(1 << 20), 0).wait()
        time.sleep(0.2)  # every thread of the engine is asleep
        refuse_to_ring()
        engine.write(file, data, 0).wait(30)
        time.sleep(0.2)
        back = bytearray(1 << 20)
        async def read():
            await engine.read(file, back, 0)
        asyncio.run(asyncio.wait_for(read(), 30))
        assert back == data
print("done")
"""


def run(code: str, *arguments: object) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr.decode()[-2000:])
    return done.stdout.decode()


def require(backend: str) -> None:
    if backend not in [status.name for status in probe().backends if status.available]:
        pytest.skip(f"{backend} does not run here")


@pytest.mark.parametrize(
    ("backend", "kind", "hashed"),
    [("io_uring", "write", "hashed"), ("libaio", "write", "plain"), ("threads", "read", "hashed")],
)
def test_a_storage_resized_during_a_transfer_is_named(tmp_path: Path, backend: str, kind: str, hashed: str) -> None:
    pytest.importorskip("torch")
    require(backend)
    assert int(run(RESIZE, backend, tmp_path / "file", kind, hashed)) == 6


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("hashed", ["plain", "hashed"])
def test_every_transfer_of_a_resized_storage_is_named(tmp_path: Path, backend: str, kind: str, hashed: str) -> None:
    pytest.importorskip("torch")
    require(backend)
    refused = sum(int(run(RESIZE, backend, tmp_path / "file", kind, hashed)) for _ in range(10))
    print(f"{backend} {kind} {hashed}: {refused} of 60 storages resized during a transfer were named, 0 crashes")
    assert refused == 60


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(
    ("backend", "call"), [("io_uring", "io_uring_enter"), ("libaio", "io_getevents"), ("libaio", "io_submit")]
)
def test_a_system_call_that_is_refused_is_a_fallback_or_an_error(
    tmp_path: Path, backend: str, call: str, when: str
) -> None:
    require(backend)
    said = run(REFUSE, backend, tmp_path / "file", call, when)
    if said.strip() == "no filter":
        pytest.skip("seccomp filters are not allowed here")
    assert (f"backend '{backend}': " in said and call in said) if when == "before" else said.strip() == "named"


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_that_cannot_be_rung_look_for_work_themselves(tmp_path: Path, backend: str) -> None:
    require(backend)
    said = run(UNHEARD, backend, tmp_path / "file").strip()
    if said == "no filter":
        pytest.skip("seccomp filters are not allowed here")
    assert said == "done"
