"""`audit_every`: planted faults are found before they count, clean runs stay as they are."""

from __future__ import annotations

import pytest
from audit_cases import BLOCKED, FAULTS, clean, planted

from zero_comm import run_ranks

DTYPES = ("fp32", "bf16")
CASES = [
    ("weight", 1, "bf16"),
    ("weight", 2, "fp32"),
    ("own weight", 2, "bf16"),
    ("buffer", 3, "fp32"),
    ("master", 1, "bf16"),
    ("master", 3, "fp32"),
    ("moment", 0, "fp32"),
    ("moment", 3, "bf16"),
    ("layout", 2, "fp32"),
    ("rate", 1, "fp32"),
    ("gradient", 0, "bf16"),
    ("gradient", 3, "fp32"),
]
NAMED = {"weight": BLOCKED, "own weight": BLOCKED, "buffer": "shift", "master": BLOCKED, "moment": BLOCKED}
WORDS = {"layout": "the layout of", "rate": "param_groups[0]", "gradient": "is another when it is computed again"}


def check(cases: list[tuple[str, int, str]]) -> None:
    for seen in run_ranks(planted, 2, cases, timeout=300.0):
        for (fault, stage, dtype), said in zip(cases, seen.values(), strict=True):
            expected = ["AuditError: the audit of step 2", "rank 1", "steps 2", NAMED.get(fault) or WORDS[fault]]
            assert all(text in said for text in expected), (fault, stage, dtype, said)


def test_a_fault_of_each_kind_is_found_and_named_on_every_rank_before_weights_change() -> None:
    check(CASES)


@pytest.mark.soak
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_every_fault_is_found_at_every_stage_and_dtype(stage: int) -> None:
    gathered = {"weight", "own weight"} if stage == 3 else set()
    check([(fault, stage, dtype) for fault in FAULTS if fault not in gathered for dtype in DTYPES])


def test_clean_runs_are_not_disturbed_whatever_the_user_writes_between_steps() -> None:
    virtual = {"deterministic": {"across_world_sizes": 4}}
    cases = [(0, "bf16", {}), (1, "fp32", {}), (2, "bf16", {}), (3, "fp32", {}), (3, "bf16", virtual)]
    assert all(all(seen) for seen in run_ranks(clean, 2, cases, timeout=300.0))
