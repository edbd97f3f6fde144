"""The public surface is exactly what `__all__` says, and importing it loads no I/O library."""

from __future__ import annotations

import subprocess
import sys

import zero_offload

NAMES = [
    "BudgetError",
    "DelayedUpdate",
    "ExactUpdate",
    "FragmentPlan",
    "HostBudget",
    "HostStore",
    "MissingExtraError",
    "NvmeStore",
    "OffloadError",
    "OffloadedOptimizer",
    "OffloadedUpdate",
    "Sealed",
    "ShardCorruptError",
    "ShardError",
    "ShardPlan",
    "StoreFullError",
    "TierOptions",
    "Trace",
    "malloc",
    "offload_activations",
    "park",
    "remove_stores",
    "unpark",
]


def test_the_export_list_is_exact() -> None:
    assert zero_offload.__all__ == NAMES == sorted(NAMES)
    assert all(hasattr(zero_offload, name) for name in NAMES)


def test_the_host_tier_works_without_the_nvme_extra_and_the_nvme_tier_says_what_to_install() -> None:
    program = """
import sys
sys.modules["zero_nvme_aio"] = None
import torch, zero_offload
weight = torch.nn.Parameter(torch.ones(8))
optimizer = zero_offload.OffloadedOptimizer([weight], lr=0.1)
weight.grad = torch.ones(8)
optimizer.step()
try:
    zero_offload.NvmeStore("unused")
except zero_offload.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'zero-offload[nvme]'" in done.stdout
