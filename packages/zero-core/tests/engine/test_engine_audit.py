"""`audit_every`: planted faults are found before they count, clean runs stay as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from audit_cases import BLOCKED, FAULTS, Case, clean, planted, tier_settings

from zero_comm import run_ranks

DTYPES = ("fp32", "bf16")
CASES = [
    ("weight", 1, "bf16", "device"),
    ("own weight", 2, "bf16", "device"),
    ("buffer", 3, "fp32", "device"),
    ("master", 3, "fp32", "device"),
    ("moment", 0, "fp32", "device"),
    ("layout", 2, "fp32", "device"),
    ("rate", 1, "fp32", "device"),
    ("gradient", 0, "bf16", "device"),
    ("tier", 3, "fp32", "nvme"),
    ("wire", 2, "bf16", "host"),
    ("wire", 3, "fp32", "device"),
]
NAMED = {"weight": BLOCKED, "own weight": BLOCKED, "buffer": "shift", "master": BLOCKED, "moment": BLOCKED}
NAMED["tier"] = f"'{BLOCKED}' changed on its tier"
WORDS = {
    "layout": "the layout of",
    "rate": "param_groups[0]",
    "gradient": "is another when it is computed again",
    "wire": "is another when it is reduced again",
}


def check(cases: list[Case], folder: Path, world_size: int = 2) -> None:
    for seen in run_ranks(planted, world_size, cases, str(folder), timeout=300.0):
        for (fault, stage, dtype, tier), said in zip(cases, seen.values(), strict=True):
            expected = ["AuditError: the audit of step 2", "rank 1", "steps 2", NAMED.get(fault) or WORDS[fault]]
            assert all(text in said for text in expected), (fault, stage, dtype, tier, said)


def test_a_fault_of_each_kind_is_found_and_named_on_every_rank_before_weights_change(tmp_path: Path) -> None:
    check(CASES, tmp_path)


def applies(fault: str, stage: int, tier: str) -> bool:
    """Return whether there is what the fault is planted in."""
    if fault in ("weight", "own weight"):
        return stage < 3
    if fault in ("master", "moment"):
        return tier == "device"
    return fault != "tier" or tier != "device"


@pytest.mark.soak
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("tier", ("device", "host", "nvme"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_every_fault_is_found_at_every_stage_dtype_and_tier(
    stage: int, tier: str, world_size: int, tmp_path: Path
) -> None:
    if tier == "device" or stage:
        faults = [fault for fault in FAULTS if applies(fault, stage, tier)]
        check([(fault, stage, dtype, tier) for fault in faults for dtype in DTYPES], tmp_path, world_size)


CLEAN = [
    (0, "bf16", "device", 0),
    (1, "fp32", "device", 0),
    (2, "bf16", "device", 0),
    (3, "fp32", "device", 0),
    (3, "bf16", "device", 4),
    (1, "bf16", "device", 4),
    (3, "bf16", "host", 0),
    (3, "fp32", "nvme", 0),
]
"""Stages, dtypes and tiers of runs without a fault, and their virtual ranks."""


@pytest.mark.parametrize(
    ("chosen", "intervals"),
    [([CLEAN[0], CLEAN[3], CLEAN[5], CLEAN[7]], (1,)), pytest.param(CLEAN, (1, 3), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_clean_runs_are_not_disturbed_whatever_the_user_writes_between_steps(
    chosen: list[tuple[int, str, str, int]], intervals: tuple[int, ...], tmp_path: Path
) -> None:
    cases: list[tuple[int, str, dict[str, Any]]] = []
    for stage, dtype, tier, virtual in chosen:
        more = {"zero_optimization": tier_settings(stage, tier, str(tmp_path))} if tier != "device" else {}
        cases.append((stage, dtype, more | ({"deterministic": {"across_world_sizes": virtual}} if virtual else {})))
    assert all(all(seen) for seen in run_ranks(clean, 2, cases, intervals, timeout=300.0))


def test_without_the_key_nothing_that_audits_is_imported() -> None:
    code = """
import sys, torch, zero_core
engine = zero_core.initialize(
    model=torch.nn.Linear(2, 2),
    config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
)[0]
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
print(*sorted(name for name in sys.modules if name.startswith("zero_core.audit")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    # Up to torch 2.10, gloo says on standard output whom it is connected to.
    assert done.stdout.splitlines()[-1].split() == ["zero_core.audit", "zero_core.audit.auditor"]
