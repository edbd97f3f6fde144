"""Scripts of well-known methods end as with plain torch, or are refused on every rank; none is silently wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
import user_scripts

from zero_comm import run_ranks

SOAK = pytest.mark.soak
TOLERANCE = 1e-12
REPRESENTATIVES = (
    "clamps_its_own_weights_in_forward",
    "evolution_strategy_writes_a_vector",
    "gan_discards_by_the_optimizers_zero_grad",
    "masks_gradients_in_a_post_accumulate_hook",
    "megatron_returns_its_bias",
    "moco_replaces_data_inside_forward",
    "pcgrad_projects_and_assigns",
    "scales_gradients_in_place_before_the_step",
    "sharpness_aware_minimisation",
    "wgan_clamps_weights_after_the_step",
)
SAME_BITS = ("clamps_its_own_weights_in_forward", "moco_replaces_data_inside_forward", "pcgrad_projects_and_assigns")
Values = Mapping[str, torch.Tensor]


def outcomes(
    name: str, world_size: int, stage: int, tier: str, unit_min: int, dtype: torch.dtype = torch.float64
) -> list[user_scripts.Outcome]:
    """How a script ends, by rank."""
    return run_ranks(user_scripts.run_sharded, world_size, name, stage, tier, unit_min, dtype, timeout=60)


def complaint(ended: list[user_scripts.Outcome], wanted: Values, tolerance: float = TOLERANCE) -> str:
    """What is wrong with how a script ended, "" for nothing."""
    refusals = [outcome.refused for outcome in ended]
    if any(refusals):
        return "" if all(refusals) and all(map(is_named, refusals)) else f"refused: {refusals}"
    for rank, outcome in enumerate(ended):
        for key, value in wanted.items():
            difference = float((outcome.values[key] - value).abs().nan_to_num(nan=float("inf")).max())
            if difference > tolerance and not all(outcome.told for outcome in ended):
                return f"rank {rank}: '{key}' is {difference:.1e} off"
    return ""


def is_named(refusal: str) -> bool:
    """Whether a refusal is ours, or torch's own for a write to a released parameter or for no gradient."""
    kind = refusal.split(":")[0]
    ours = kind in ("EditRefusedError", "PartitionError", "ReleasedParameterError", "NonFiniteGradientError")
    ours |= kind == "UsageError"
    no_gradient = "must be Tensor, not NoneType" in refusal
    return ours or no_gradient or "more than one element of the written-to tensor" in refusal


def complaints(names: Iterable[str], world_size: int, stage: int, tier: str, unit_min: int) -> dict[str, str]:
    """By script, what is wrong with it; those with nothing wrong are left out."""
    found = {
        name: complaint(outcomes(name, world_size, stage, tier, unit_min), user_scripts.run_plain(name))
        for name in names
    }
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize(
    ("stage", "world_size", "tier"), [(0, 2, "device"), (1, 3, "cpu"), (2, 1, "device"), (3, 2, "cpu")]
)
def test_scripts_of_known_methods_end_as_with_plain_torch_or_are_refused(
    stage: int, world_size: int, tier: str
) -> None:
    assert complaints(REPRESENTATIVES, world_size, stage, tier, 1) == {}


def different_bits(names: Iterable[str], world_size: int, stages: Iterable[int]) -> dict[tuple[str, int], str]:
    """By script and stage, where bfloat16 weights are not those of stage 0."""
    found = {}
    for name in names:
        expected = outcomes(name, world_size, 0, "device", 1, torch.bfloat16)
        for stage in stages:
            ended = outcomes(name, world_size, stage, "device", 1, torch.bfloat16)
            if not expected[0].refused:
                found[name, stage] = complaint(ended, expected[0].values, tolerance=0.0)
    return {key: text for key, text in found.items() if text}


def test_in_bfloat16_the_stages_agree_on_scripts_to_the_bit() -> None:
    assert different_bits(SAME_BITS, 2, (1, 3)) == {}


@SOAK
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_in_bfloat16_the_stages_agree_on_all_scripts_to_the_bit(world_size: int) -> None:
    assert different_bits(user_scripts.SCRIPTS, world_size, (1, 2, 3)) == {}


@SOAK
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("tier", ("device", "cpu"))
@pytest.mark.parametrize("unit_min", (1, 100_000))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_all_scripts_of_known_methods(stage: int, unit_min: int, tier: str, world_size: int) -> None:
    assert complaints(user_scripts.SCRIPTS, world_size, stage, tier, unit_min) == {}
