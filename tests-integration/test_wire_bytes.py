"""What one optimizer step sends, per rank: the formulas, by the ledger, and the ledger by the kernel.

With Ψ parameters on N ranks, accumulation 1 and no persistent parameters, one rank sends (N-1)/N of

    stage 0   Ψ reduced + Ψ averaged gradients gathered                        = 2Ψ elements
    stage 1   Ψ reduced + Ψ published                                          = 2Ψ
    stage 2   the same                                                         = 2Ψ
    stage 3   Ψ gathered for forward + Ψ gathered for backward + Ψ reduced     = 3Ψ

less, at stage 3, the unit that backward needs first, which stays gathered since forward.
Elements are as wide as what travels: the parameter dtype. One exception: in bf16, stage 0 gathers the averaged gradient
in the dtype it was accumulated in (float32), so that its optimizer sees what those of the other stages see.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _wire_training import BLOCKS, bytes_per_step, elements, kept_elements

from zero_comm import run_ranks

SOAK = pytest.mark.soak
STAGES = (0, 1, 2, 3)
ITEMSIZE = {"fp32": 4, "bf16": 2}
SMALL, DEFAULT, LARGE = 130_000, 50_000_000, 10**12
HERE = Path(__file__).resolve().parent


def all_stages(dtype: str) -> dict[int, list[dict[str, int]]]:
    return {stage: bytes_per_step(stage, dtype, DEFAULT) for stage in STAGES}


@functools.cache
def measured(world_size: int, dtype: str) -> list[dict[int, list[dict[str, int]]]]:
    return run_ranks(all_stages, world_size, dtype)


def formula(stage: int, dtype: str) -> float:
    """Bytes per step and rank, without the factor (N-1)/N."""
    reduced = elements() * ITEMSIZE[dtype]
    if stage == 0:
        return reduced + elements() * ITEMSIZE["fp32"]
    if stage == 3:
        return 3 * reduced - kept_elements() * ITEMSIZE[dtype]
    return 2 * reduced


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(2, "bf16"), (3, "fp32"), *(pytest.param(*c, marks=SOAK) for c in ((2, "fp32"), (4, "fp32"), (4, "bf16")))],
)
def test_every_step_sends_the_bytes_of_the_formula_on_every_rank(world_size: int, dtype: str, stage: int) -> None:
    expected = formula(stage, dtype) * (world_size - 1) / world_size
    for answers in measured(world_size, dtype):
        for step in answers[stage]:
            assert sum(step.values()) == pytest.approx(expected, rel=0.01)


def all_prefetches() -> list[list[dict[str, int]]]:
    return [bytes_per_step(3, "fp32", prefetch) for prefetch in (0, SMALL, DEFAULT, LARGE)]


def test_prefetch_never_changes_the_bytes() -> None:
    assert elements() // BLOCKS < SMALL < elements()  # about one block in flight
    for answers in run_ranks(all_prefetches, 2):
        assert all(rows == answers[0] for rows in answers) and len({str(step) for step in answers[0]}) == 1


RANKS = """
import os, subprocess, sys
world_size, script, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3]
shared = dict(WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="lo")
ranks = [subprocess.Popen([sys.executable, script, steps], env={**os.environ, **shared, "RANK": str(rank)})
         for rank in range(world_size)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def why_no_namespace() -> str | None:
    """Why this machine gives no private network namespace, or None."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"the command '{tool}' is not installed"
    tried = subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no private network namespace: {tried.stderr.strip()}"


def test_the_ledger_agrees_with_the_kernels_counters_of_a_private_network_namespace() -> None:
    reason = why_no_namespace()
    if reason is not None:
        pytest.skip(reason)
    job = [sys.executable, "-c", RANKS, "2", str(HERE / "_wire_training.py"), "2"]
    inside = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *job]
    done = subprocess.run(
        inside, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for stage, counted in json.loads(done.stdout.splitlines()[-1]).items():
        headers = counted["kernel"] / counted["ledger"] - 1
        assert 0 <= headers <= 0.05, f"stage {stage}: ledger {counted['ledger']}, kernel {counted['kernel']}"
