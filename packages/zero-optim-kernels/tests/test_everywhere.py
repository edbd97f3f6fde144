"""The whole suite with every instruction set, on emulated processors, and the kernels for another kind of processor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zero_optim_kernels as zok

HERE = Path(__file__).parent
SOURCES = ("target_scalar", "target_neon")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


def run_suite(*emulator: str, **environment: str) -> None:
    """Run all tests of this folder that are not long, and fail with what they print."""
    command = [*emulator, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0", str(HERE)]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def best_of(emulator: list[str]) -> tuple[str, str]:
    """The instruction set that runs on an emulated processor without AVX-512, after a step, and why others cannot."""
    code = (
        "import array, zero_optim_kernels as z\nx = array.array('f', [1.0] * 99)\n"
        "z.sgd_step(x, x, None, 99, step=1, lr=0.5)\nassert set(x) == {0.5}\n"
        "print(z.active_isa(), *z.unavailable_isas().values())"
    )
    environment = {key: value for key, value in os.environ.items() if key != "ZERO_ISA"}
    command = [*emulator, sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "lacks avx512f" in found
    name, _, reasons = found.partition(" ")
    return name, reasons


@pytest.mark.parametrize("isa", zok.available_isas())
def test_the_suite_passes_with_each_instruction_set(isa: str) -> None:
    run_suite(ZERO_ISA=isa)


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
def test_the_suite_passes_on_a_processor_without_avx512() -> None:
    emulator = ["qemu-x86_64", "-cpu", "max"]
    assert best_of(emulator)[0] == "avx2"
    run_suite(*emulator, ZERO_EMULATOR=" ".join(emulator))


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
def test_a_processor_without_avx2_runs_the_scalar_kernels() -> None:
    # Without torch, whose wheels do not run there.
    name, reasons = best_of(["qemu-x86_64", "-cpu", "Nehalem"])
    assert name == "scalar" and "lacks avx2" in reasons


@pytest.mark.skipif(platform.machine() == "aarch64", reason="the suite itself runs these kernels here")
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="needs a compiler for 64-bit Arm and qemu-user",
)
def test_the_kernels_for_arm_write_the_bits_of_the_scalar_ones(tmp_path: Path) -> None:
    flags = ["-std=c++17", "-static", "-O3", "-fno-math-errno", "-ffp-contract=off", "-Wno-psabi"]
    sources = [HERE / "compare_targets.cpp", *(HERE.parent / "csrc" / f"{name}.cpp" for name in SOURCES)]
    program = tmp_path / "compare"
    subprocess.run(["aarch64-linux-gnu-g++", *flags, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run(["qemu-aarch64", str(program)], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "0 failures" in result.stdout, result.stdout
