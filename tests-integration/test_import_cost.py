"""What an import costs and does, in fresh processes."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys

import pytest

TIMED = """
import time
begun = time.process_time()
import torch
after_torch = time.process_time()
import zero_core
print(time.process_time() - after_torch, after_torch - begun)
"""

WATCHED = """
import json, os, sys, threading
import psutil
import torch

def state():
    process = psutil.Process()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = sorted(os.readlink(link) for link in links if os.path.islink(link))
    return {
        "children": [child.pid for child in process.children(recursive=True)],
        "native threads": process.num_threads(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "open devices": [f for f in files if f.startswith("/dev/")],
        "sockets": [f for f in files if f.startswith("socket:")],
        "cuda is initialised": torch.cuda.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
    }

states = [state()]
for code in sys.argv[1:]:
    exec(code)
    states.append(state())
print(json.dumps(states))
"""

MODULES = """
import json, sys
for code in sys.argv[1:]:
    exec(code)
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""

HEAVY = {"deepspeed", "matplotlib", "numpy.testing", "pandas", "pydantic", "rich", "scipy", "transformers", "triton"}


def fresh(code: str, *arguments: str) -> str:
    """What a new interpreter prints, with no variable that would make it different from a user's."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV", "ZERO_TORCH_UNCOLLECTED"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def imported(*codes: str) -> list[frozenset[str]]:
    """The packages that are there after each of ``codes``, which run one after the other in a new interpreter."""
    return [frozenset(json.loads(line)) for line in fresh(MODULES, *codes).splitlines()]


UPWARDS = ("torch", "zero_precision", "zero_comm", "zero_partition", "zero_core")


def upwards() -> list[tuple[str, frozenset[str]]]:
    """Each package of `UPWARDS` and what its import brings beyond the ones before it, which are those below it."""
    there = imported(*(f"import {package}" for package in UPWARDS))
    return [(package, after - before) for package, before, after in zip(UPWARDS[1:], there, there[1:], strict=False)]


def test_importing_zero_core_costs_at_most_150_ms_of_processor_time_beyond_torch() -> None:
    fresh(TIMED)  # compiles what is not compiled yet
    samples = [[float(x) for x in fresh(TIMED).split()] for _ in range(3)]
    ours, torchs = (statistics.median(column) for column in zip(*samples, strict=True))
    assert ours <= 0.15, f"import zero_core: {ours:.3f} s beyond import torch ({torchs:.3f} s)"


def test_importing_starts_nothing_changes_nothing_and_touches_no_device() -> None:
    codes = ["import zero_comm, zero_partition", "import zero_core", "from zero_core import Config, Engine, initialize"]
    before, *after = json.loads(fresh(WATCHED, *codes))
    assert after == [before] * len(codes)


def test_importing_brings_nothing_heavy_besides_torch() -> None:
    for package, brought in upwards():
        assert not brought & HEAVY, package


@pytest.mark.parametrize("package", ["zero_launch", "zero_nvme_aio", "zero_optim_kernels", "zero_ckpt"])
def test_packages_that_need_no_torch_import_without_it(package: str) -> None:
    (found,) = imported(f"import {package}")
    assert "torch" not in found


def test_no_package_imports_a_sibling_from_the_same_floor_or_above() -> None:
    for package, brought in upwards()[:3]:
        assert {name for name in brought if name.startswith("zero_")} == {package}
