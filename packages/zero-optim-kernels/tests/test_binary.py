"""The extension module as a binary: what it exports, where its wide instructions are, and how long it takes to load."""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
import sys

import pytest

import zero_optim_kernels as zok
from zero_optim_kernels import _native

needs_binutils = pytest.mark.skipif(
    shutil.which("objdump") is None or shutil.which("nm") is None, reason="needs binutils"
)
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 instructions")
VEX = r"^\s*[0-9a-f]+:\s+v[a-z0-9]+\s|[yz]mm\d"
EVEX = r"zmm\d|\{%k\d\}|[xy]mm(1[6-9]|2\d|3[01])\b"
NAMES = [
    "active_isa",
    "adagrad_step",
    "adam_step",
    "available_isas",
    "cast",
    "count_nonfinite",
    "default_threads",
    "dequantize_blocks",
    "digests",
    "dry_run_kernels",
    "l2_norm",
    "l2_norm_squared",
    "l2_norms_squared",
    "lamb_apply",
    "lamb_step",
    "lion_step",
    "quantize_blocks",
    "scale",
    "sgd_step",
    "sum_slices",
    "unavailable_isas",
]


def test_the_export_list_is_exact() -> None:
    assert zok.__all__ == NAMES == sorted(NAMES)
    assert {name for name in dir(zok) if not name.startswith("_")} - set(NAMES) <= {
        *("annotations", "blocks", "buffers", "isa", "reference", "steps", "torch")
    }


@needs_binutils
def test_only_the_init_symbol_is_exported() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", _native.__file__], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in listing.stdout.splitlines()] == ["PyInit__native"]


@functools.cache
def disassembly() -> list[str]:
    """The lines of the module's disassembly."""
    command = ["objdump", "-d", "--no-show-raw-insn", _native.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def functions_with(pattern: str) -> set[str]:
    """Names of the functions that have an instruction matching the pattern."""
    wanted, found, name = re.compile(pattern), set(), ""
    for line in disassembly():
        if line.endswith(">:"):
            name = line.split("<", 1)[1][:-2]
        elif wanted.search(line):
            found.add(name)
    return found


@x86
@needs_binutils
def test_wide_instructions_are_in_the_functions_of_their_target_only() -> None:
    vex = functions_with(VEX)
    assert any("target_avx2" in name for name in vex) and any("target_avx512" in name for name in vex)
    assert not {name for name in vex if "target_avx2" not in name and "target_avx512" not in name}
    evex = functions_with(EVEX)
    assert not {name for name in evex if "target_avx512" not in name}


@x86
@needs_binutils
def test_the_scalar_kernels_are_in_the_binary_and_hold_no_avx() -> None:
    scalar = {name for name in functions_with(r"xmm\d") if "target_scalar" in name}
    assert len(scalar) > 20
    assert not scalar & functions_with(VEX)


def test_importing_is_quick_and_brings_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, time; start = time.process_time(); import zero_optim_kernels; "
        "print(time.process_time() - start, 'torch' in sys.modules, 'numpy' in sys.modules, 'asyncio' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    lines = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(5)]
    assert all(line[1:] == ["False", "False", "False"] for line in lines)
    assert min(float(line[0]) for line in lines) < 0.030
