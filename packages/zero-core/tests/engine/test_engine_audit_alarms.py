"""`audit_every` raises no alarm in correct scripts, and still computes gradients again where it can."""

from __future__ import annotations

from audit_outcomes import FIRST, MORE, outcomes

from zero_comm import run_ranks

NEVER = {
    "engine_called_twice",
    "two_engines",
    "gradient_penalty_of_two_engines",
    "weights_in_the_loss",
    "closure_output",
    "compiled_engine",
    "hooks_that_change_values",
    "second_derivatives_of_inputs",
    "returned_view_of_a_weight",
    "cached_parametrization",
    "vmap_of_a_module",
    "a_backward_of_the_users_before",
    "dispatch_mode_around_the_step",
    "settings_around_the_forward",
    "experts_that_differ_by_rank",
    "saved_tensors_in_half",
}
"""Scripts in which no unit's gradient comes from one call that can be repeated on both ranks."""
ELSEWHERE = [
    (name, stage, dtype, tier)
    for stage, dtype, tier in ((1, "fp64", "device"), (2, "bf16", "device"), (3, "bf16", "cpu"))
    for name in ("engine_called_twice", "weights_in_the_loss", "hooks_that_change_values", "no_sync", "two_losses")
]
COMPARED = {"accumulation", "checkpointed_submodules", "dropout_and_batch_norm", "two_losses"}
NARROW = ("autocast_around_the_forward", 3, "fp32", "device")


def test_correct_scripts_train_on_and_gradients_are_computed_again_where_they_can_be() -> None:
    cases = [NARROW if name == NARROW[0] else (name, 3, "fp64", "device") for name in FIRST + MORE]
    for seen in run_ranks(outcomes, 2, cases, COMPARED, timeout=300.0):
        found = dict(zip(cases, seen, strict=True))
        assert not {case: wrong for case, (wrong, _, _) in found.items() if wrong is not None}
        assert {case[0] for case, (_, repeated, _) in found.items() if not any(repeated)} == NEVER


def test_correct_scripts_train_on_at_other_stages_dtypes_and_tiers() -> None:
    for seen in run_ranks(outcomes, 2, ELSEWHERE, timeout=300.0):
        assert not {case: wrong for case, (wrong, _, _) in zip(ELSEWHERE, seen, strict=True) if wrong is not None}


def test_the_first_rank_says_once_why_no_gradient_is_computed_again() -> None:
    case = ("engine_called_twice", 3, "fp64", "device")
    first, second = (seen[0][2] for seen in run_ranks(outcomes, 2, [case], timeout=300.0))
    assert ["its module was called several times" in text for text in first] == [True]
    assert not second
