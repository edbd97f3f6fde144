"""Scripts of well-known methods end as with plain torch, or are refused on every rank; none is silently wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch
import user_scripts
from user_scripts import Where

from zero_comm import run_ranks

SOAK = pytest.mark.soak
TOLERANCE = 1e-12
REPRESENTATIVES = (
    "clamps_its_own_weights_in_forward",
    "clamps_what_the_groups_list",
    "clips_what_the_groups_list",
    "evolution_strategy_writes_a_vector",
    "gan_discards_by_the_optimizers_zero_grad",
    "grows_an_embedding_through_data",
    "halves_all_moments",
    "halves_moments_found_by_get",
    "masks_gradients_in_a_post_accumulate_hook",
    "megatron_returns_its_bias",
    "moco_replaces_data_inside_forward",
    "pcgrad_projects_and_assigns",
    "scales_gradients_in_place_before_the_step",
    "sharpness_aware_minimisation",
    "steps_between_a_forward_and_its_backward",
    "wgan_clamps_weights_after_the_step",
)
SAME_BITS = ("clamps_its_own_weights_in_forward", "moco_replaces_data_inside_forward", "pcgrad_projects_and_assigns")
Values = Mapping[str, torch.Tensor]


def outcomes(name: str, world_size: int, where: Where) -> list[user_scripts.Outcome]:
    """How a script ends, by rank."""
    with TemporaryDirectory() as folder:
        return run_ranks(user_scripts.run_sharded, world_size, name, replace(where, folder=folder), timeout=60)


def complaint(ended: list[user_scripts.Outcome], wanted: Values, tolerance: float = TOLERANCE) -> str:
    """What is wrong with how a script ended, "" for nothing."""
    refusals = [outcome.refused for outcome in ended]
    if any(refusals):
        return "" if all(refusals) and all(map(is_named, refusals)) else f"refused: {refusals}"
    for rank, outcome in enumerate(ended):
        for key, value in wanted.items():
            difference = float((outcome.values[key] - value).abs().nan_to_num(nan=float("inf")).max())
            if difference > tolerance:
                return f"rank {rank}: '{key}' is {difference:.1e} off"
    return ""


def is_named(refusal: str) -> bool:
    """Return whether a refusal is ours, here or on the rank that is told of, or torch's own for a write to a released
    parameter."""
    kind = re.sub(r"^PeerError: rank \d+ failed: ", "", refusal).split(":")[0]
    ours = kind in ("EditRefusedError", "PartitionError", "ReleasedParameterError", "NonFiniteGradientError")
    ours |= kind == "UsageError"
    return ours or "more than one element of the written-to tensor" in refusal


def complaints(names: Iterable[str], world_size: int, where: Where) -> dict[str, str]:
    """By script, what is wrong with it; those with nothing wrong are left out."""
    found = {name: complaint(outcomes(name, world_size, where), user_scripts.run_plain(name)) for name in names}
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize(
    ("world_size", "where", "names"),
    [
        (2, Where(0), REPRESENTATIVES[::3]),
        (3, Where(1, "cpu"), REPRESENTATIVES[1::3]),
        (1, Where(2, "nvme"), REPRESENTATIVES[2::3]),
        (2, Where(1), ("goes_back_to_a_copy_of_the_states",)),
        (2, Where(3, "cpu"), REPRESENTATIVES[::2]),
        (3, Where(3, "nvme"), REPRESENTATIVES[1::2]),
    ],
)
def test_scripts_of_known_methods_end_as_with_plain_torch_or_are_refused(
    world_size: int, where: Where, names: Sequence[str]
) -> None:
    assert complaints(names, world_size, where) == {}


def different_bits(names: Iterable[str], world_size: int, first: Where, others: Iterable[Where]) -> dict[str, str]:
    """By script and place, where the bfloat16 weights of ``others`` are not those of ``first``."""
    found = {}
    for name in names:
        expected = outcomes(name, world_size, replace(first, dtype=torch.bfloat16))
        for other in others:
            ended = outcomes(name, world_size, replace(other, dtype=torch.bfloat16))
            if not expected[0].refused:
                found[f"{name} on {other}"] = complaint(ended, expected[0].values, tolerance=0.0)
    return {key: text for key, text in found.items() if text}


@pytest.mark.parametrize(
    ("first", "others", "names"),
    [(Where(0), [Where(3)], SAME_BITS), (Where(1, "cpu"), [Where(3, "nvme")], SAME_BITS[:1])],
)
def test_in_bfloat16_the_stages_agree_on_scripts_to_the_bit(
    first: Where, others: list[Where], names: Sequence[str]
) -> None:
    assert different_bits(names, 2, first, others) == {}


@SOAK
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("tiers", (("device",), ("cpu", "nvme")))
def test_in_bfloat16_the_stages_agree_on_all_scripts_to_the_bit(tiers: tuple[str, ...], world_size: int) -> None:
    first = Where(0 if "device" in tiers else 1, tiers[0])
    others = [Where(stage, tier) for tier in tiers for stage in (1, 2, 3) if Where(stage, tier) != first]
    assert different_bits(user_scripts.SCRIPTS, world_size, first, others) == {}


@SOAK
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("tier", ("device", "cpu", "nvme"))
@pytest.mark.parametrize("unit_min", (1, 100_000))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_all_scripts_of_known_methods(stage: int, unit_min: int, tier: str, world_size: int) -> None:
    assert complaints(user_scripts.SCRIPTS, world_size, Where(stage, tier, unit_min)) == {}
