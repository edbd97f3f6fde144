"""`audit_every` raises no alarm in correct scripts, and still computes gradients again where it can."""

from __future__ import annotations

import pytest
from audit_outcomes import FIRST, MORE, outcomes

from zero_comm import run_ranks

NEVER = {
    "engine_called_twice",
    "two_engines",
    "gradient_penalty_of_two_engines",
    "weights_in_the_loss",
    "closure_output",
    "hooks_that_change_values",
    "second_derivatives_of_inputs",
    "returned_view_of_a_weight",
    "cached_parametrization",
    "vmap_of_a_module",
    "a_backward_of_the_users_before",
    "dispatch_mode_around_the_step",
    "settings_around_the_forward",
    "experts_that_differ_by_rank",
}
"""Scripts in which no unit's gradient comes from one call that can be repeated on both ranks."""
ELSEWHERE = [
    (name, stage, dtype, tier)
    for stage, dtype, tier in ((1, "fp64", "device"), (2, "bf16", "device"), (1, "bf16", "cpu"), (3, "bf16", "cpu"))
    for name in (
        "engine_called_twice",
        "weights_in_the_loss",
        "tied_after_initialize",
        "hooks_that_change_values",
        "accumulation",
        "checkpointed_submodules",
        "no_sync",
        "dropout_and_batch_norm",
        "two_losses",
    )
]
NARROW = ("autocast_around_the_forward", 3, "fp32", "device")


def test_correct_scripts_train_on_as_without_audits_and_one_that_allows_no_repetition_is_told() -> None:
    cases = [NARROW if name == NARROW[0] else (name, 3, "fp64", "device") for name in FIRST + MORE]
    for seen in run_ranks(outcomes, 2, cases, timeout=300.0):
        found = dict(zip(cases, seen, strict=True))
        assert not {case: wrong for case, (wrong, _, _) in found.items() if wrong is not None}
        assert {case[0] for case, (_, repeated, _) in found.items() if not any(repeated)} == NEVER


@pytest.mark.parametrize("cases", [ELSEWHERE], ids=["stages, dtypes and tiers"])
def test_correct_scripts_train_on_elsewhere(cases: list[tuple[str, int, str, str]]) -> None:
    for seen in run_ranks(outcomes, 2, cases, timeout=300.0):
        assert not {case: wrong for case, (wrong, _, _) in zip(cases, seen, strict=True) if wrong is not None}
