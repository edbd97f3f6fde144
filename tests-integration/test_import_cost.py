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

before = state()
exec(sys.argv[1])
print(json.dumps([before, state()]))
"""

MODULES = """
import json, sys
exec(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""

HEAVY = {"deepspeed", "matplotlib", "numpy.testing", "pandas", "pydantic", "rich", "scipy", "transformers", "triton"}


def fresh(code: str, *arguments: str) -> str:
    """What a new interpreter prints, with no variable that would make it different from a user's."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def imported(code: str) -> frozenset[str]:
    """The packages that are there after ``code``."""
    return frozenset(json.loads(fresh(MODULES, code)))


def test_importing_zero_core_costs_at_most_150_ms_of_processor_time_beyond_torch() -> None:
    fresh(TIMED)  # compiles what is not compiled yet
    samples = [[float(x) for x in fresh(TIMED).split()] for _ in range(3)]
    ours, torchs = (statistics.median(column) for column in zip(*samples, strict=True))
    assert ours <= 0.15, f"import zero_core: {ours:.3f} s beyond import torch ({torchs:.3f} s)"


@pytest.mark.parametrize(
    "code", ["import zero_core", "from zero_core import Config, Engine, initialize", "import zero_comm, zero_partition"]
)
def test_importing_starts_nothing_changes_nothing_and_touches_no_device(code: str) -> None:
    before, after = json.loads(fresh(WATCHED, code))
    assert after == before


@pytest.mark.parametrize("package", ["zero_core", "zero_comm", "zero_partition", "zero_precision"])
def test_importing_brings_nothing_heavy_besides_torch(package: str) -> None:
    assert not (imported(f"import {package}") - imported("import torch")) & HEAVY


@pytest.mark.parametrize("package", ["zero_launch", "zero_nvme_aio", "zero_optim_kernels", "zero_ckpt"])
def test_packages_that_need_no_torch_import_without_it(package: str) -> None:
    assert "torch" not in imported(f"import {package}")


def test_no_package_imports_a_sibling_from_the_same_floor_or_above() -> None:
    below = {"zero_comm": set(), "zero_precision": set(), "zero_partition": {"zero_comm", "zero_precision"}}
    for package, allowed in below.items():
        brought = {name for name in imported(f"import {package}") if name.startswith("zero_")}
        assert brought <= {package, *allowed}
