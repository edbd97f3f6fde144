"""Leaks, limits and stress; the long ones are `soak`."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash

from zero_nvme_aio import AlignedBuffer, Engine

CYCLES = """
import os, sys, gc
import zero_nvme_aio as aio
from zero_nvme_aio import _native

def status(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key + ":")).split()[1])

def facts():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), status("VmLck"), status("VmPin"), status("VmRSS")

folder, backend, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = bytes(5000)
out = bytearray(5000)

def cycle(io, number):
    with io.open(os.path.join(folder, str(number % 7)), "rw") as file:
        io.write(file, data, 1).wait()
        io.read(file, out, 1).wait()

def engines(count):
    plain = memoryview(bytearray((1 << 20) + 1))[1:]
    for number in range(count):
        with aio.Engine(backend=backend) as io, io.open(os.path.join(folder, "e"), "rw") as file:
            io.write(file, plain, 0).wait()

engines(5)
before_engines = facts()
with aio.Engine(backend=backend) as io:
    for number in range(500):
        cycle(io, number)
    before = facts()
    for number in range(cycles):
        cycle(io, number)
    after = facts()
engines(30)
after_engines = facts()
assert _native.pinned_bytes() == 0
print(aio.Engine(backend=backend).backend, *before, *after, *before_engines, *after_engines)
"""


def run_cycles(folder: Path, backend: str, cycles: int, prefix: list[str]) -> None:
    command = [*prefix, sys.executable, "-c", CYCLES, str(folder), backend, str(cycles)]
    # The address sanitizer keeps freed memory aside for a while, which here would look like a leak.
    options = f"{os.environ.get('ASAN_OPTIONS', '')}:quarantine_size_mb=0:thread_local_quarantine_size_kb=0"
    environment = {**os.environ, "ASAN_OPTIONS": options}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    name, *numbers = done.stdout.split()
    assert name == backend
    facts = [list(map(int, numbers[i : i + 4])) for i in range(0, 16, 4)]
    for before, after in ((facts[0], facts[1]), (facts[2], facts[3])):
        assert after[:3] == before[:3], "descriptors, locked or pinned memory grew"
        assert after[3] - before[3] < 2048, f"resident memory grew by {after[3] - before[3]} KiB"


SHORT_OR_WHOLE = pytest.mark.parametrize("cycles", [2_000, pytest.param(10_000, marks=pytest.mark.soak)])


@SHORT_OR_WHOLE
def test_thousands_of_open_close_cycles_leak_nothing(tmp_path: Path, backend: str, cycles: int) -> None:
    run_cycles(tmp_path, backend, cycles, [])


@SHORT_OR_WHOLE
def test_the_same_as_an_unprivileged_user_with_little_lockable_memory(backend: str, cycles: int) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        pytest.skip("changing to an unprivileged user needs root, setpriv and prlimit")
    prefix = ["prlimit", "--memlock=8388608:8388608", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    prefix += ["--bounding-set=-all", "--inh-caps=-all"]
    probe = subprocess.run([*prefix, sys.executable, "-c", "import zero_nvme_aio"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"the unprivileged user cannot import the package: {probe.stderr.strip()[-200:]}")
    folder = Path("/tmp") / f"zero-nvme-aio-nobody-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    try:
        run_cycles(folder, backend, cycles, prefix)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_eight_threads_on_one_engine_neither_block_each_other_nor_mix_bytes(
    tmp_path: Path, backend: str, seconds: int
) -> None:
    problems: list[str] = []
    counts = [0] * 8
    deadline = time.monotonic() + seconds

    def work(io: Engine, number: int) -> None:
        generator = random.Random(number)
        own = bytearray(generator.randbytes(700_000))
        base = memoryview(AlignedBuffer(1 << 20))
        with io.open(tmp_path / f"own{number}", "rw") as file, io.open(tmp_path / "shared", "rw") as shared:
            while time.monotonic() < deadline:
                size = generator.choice([1, 5000, 65536, 300_001, 700_000])
                shift = generator.choice([0, 1, 64])
                begin = generator.randrange(700_000 - size + 1)
                source = memoryview(own)[begin : begin + size]
                target, offset = generator.choice([(file, begin), (shared, number * (1 << 20) + begin)])
                out = base[shift : shift + size]
                request = io.write(target, source, offset, checksum=True)
                if generator.random() < 0.1:
                    io.sync(target)
                request.wait()
                got = io.read(target, out, offset, checksum=True)
                got.wait()
                expected = f"xxh3_64:{xxhash.xxh3_64_hexdigest(source)}"
                if not request.checksum == got.checksum == expected:
                    problems.append(
                        f"thread {number}: {size} bytes at {offset}: {request.checksum} {got.checksum} {expected}"
                    )
                counts[number] += 1

    with Engine(backend=backend, block_bytes=65536, queue_depth=16) as io:
        threads = [threading.Thread(target=work, args=(io, number), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 30)
            assert not thread.is_alive(), f"deadlock; transfers so far {counts}"
    assert not problems, problems[:3]
    assert min(counts) > 0
