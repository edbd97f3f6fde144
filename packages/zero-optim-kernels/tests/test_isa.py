"""Dispatch: which instruction set runs, that all give the same bits, and the thread pool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import zero_optim_kernels as zok

HERE = Path(__file__).parent
ALL = {"avx512", "avx2", "neon", "scalar"}
PERIOD = {"cpu/job/cpu.cfs_period_us": "100000"}


# What runs a program as if on another processor, such as "qemu-x86_64 -cpu max", when this test run is under it.
EMULATOR = os.environ.get("ZERO_EMULATOR", "").split()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [*EMULATOR, sys.executable, *command]
    return subprocess.run(
        program, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_active_instruction_set_is_an_available_one() -> None:
    assert zok.active_isa() in zok.available_isas()
    assert set(zok.available_isas()) | set(zok.unavailable_isas()) <= ALL
    assert not set(zok.available_isas()) & set(zok.unavailable_isas())
    assert zok.available_isas()[-1] == "scalar"
    forced = os.environ.get("ZERO_ISA")
    assert zok.active_isa() == (forced or zok.available_isas()[0])


def test_all_available_instruction_sets_write_the_same_bits() -> None:
    lines = {}
    for isa in zok.available_isas():
        result = run(str(HERE / "isa_digest.py"), ZERO_ISA=isa)
        assert result.returncode == 0, result.stderr
        name, digest = result.stdout.split()
        assert name == isa
        lines[isa] = digest
    assert len(set(lines.values())) == 1, lines


def test_an_unknown_instruction_set_is_an_error_with_the_choices() -> None:
    result = run("-c", "import zero_optim_kernels as z; z.active_isa()", ZERO_ISA="sse9")
    assert "ValueError" in result.stderr and "sse9" in result.stderr and "scalar" in result.stderr


def test_an_instruction_set_that_the_processor_lacks_says_so() -> None:
    for isa, reason in zok.unavailable_isas().items():
        assert "lacks" in reason
        result = run("-c", "import zero_optim_kernels as z; z.active_isa()", ZERO_ISA=isa)
        assert "ValueError" in result.stderr and reason in result.stderr


def test_a_forced_instruction_set_that_cannot_run_writes_nothing() -> None:
    code = (
        "import array, zero_optim_kernels as z\nx = array.array('f', [1.0] * 8)\n"
        "try: z.scale(x, 8, 2.0)\nexcept ValueError: print(x[0])"
    )
    assert run("-c", code, ZERO_ISA="none").stdout.strip() == "1.0"


def test_the_default_number_of_threads_is_the_environments_or_the_processors() -> None:
    code = "import zero_optim_kernels as z; print(z.default_threads())"
    assert run("-c", code, OMP_NUM_THREADS="3").stdout.strip() == "3"
    assert int(run("-c", code, OMP_NUM_THREADS="0").stdout) == int(run("-c", code, OMP_NUM_THREADS="").stdout)
    result = run("-c", code, OMP_NUM_THREADS="")
    assert 1 <= int(result.stdout) <= len(os.sched_getaffinity(0))


# As root of a user namespace of its own, with files of its own for the cgroup.
CONTAINER = """
set -e
mount -t tmpfs none /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/outer/inner /sys/fs/cgroup/cpu/job
{files}
mount --bind /sys/fs/cgroup/lines /proc/$$/cgroup
exec {python} -c 'import os, zero_optim_kernels as z; print(z.default_threads(), len(os.sched_getaffinity(0)))'
"""


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({"lines": "0::/", "cpu.max": "150000 100000"}, 2),
        ({"lines": "0::/outer/inner", "outer/inner/cpu.max": "max 100000", "outer/cpu.max": "50000 100000"}, 1),
        ({"lines": "0::/host/path", "cpu.max": "100000 100000"}, 1),
        ({"lines": "4:memory:/x\n1:cpu,cpuacct:/job", "cpu/job/cpu.cfs_quota_us": "90000", **PERIOD}, 1),
        ({"lines": "1:cpu:/job", "cpu/job/cpu.cfs_quota_us": "-1", **PERIOD}, 1 << 20),
        ({"lines": "0::/outer"}, 1 << 20),
    ],
    ids=str,
)
@pytest.mark.skipif(bool(EMULATOR) or shutil.which("unshare") is None, reason="needs namespaces")
def test_the_default_number_of_threads_keeps_to_the_cgroups_quota(files: dict[str, str], processors: int) -> None:
    lines = [f"printf '%b\\n' '{text}' > /sys/fs/cgroup/{name}" for name, text in files.items()]
    script = CONTAINER.format(files="\n".join(lines), python=sys.executable)
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    if subprocess.run([*command[:-1], "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespaces here")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    threads, available = map(int, result.stdout.split())
    assert threads == min(processors, available)


@pytest.mark.skipif(
    bool(EMULATOR), reason="qemu-user aborts when the forked child of a threaded process starts a thread"
)
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    x = np.ones(1 << 20, np.float32)
    assert zok.l2_norm_squared(x, x.size, threads=4) == x.size
    child = os.fork()
    if child == 0:
        os._exit(0 if zok.l2_norm_squared(x, x.size, threads=4) == x.size else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_calls_from_many_threads_at_once_are_all_right() -> None:
    data = [np.full(300_000 + i, float(i), np.float32) for i in range(8)]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if zok.l2_norm_squared(data[index], data[index].size, threads=3) != float(index) ** 2 * data[index].size:
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("threads", [1, 2, 64])
def test_any_number_of_threads_is_served(threads: int) -> None:
    x = np.ones(2_000_000, np.float32)
    zok.scale(x, x.size, 2.0, threads=threads)
    assert np.all(x == 2.0)
