"""Scripts of well-known methods end as with plain torch, or are refused on every rank; none is silently wrong."""

from __future__ import annotations

import pytest
import user_scripts

from zero_comm import run_ranks

TOLERANCE = 1e-12


def complaint(name: str, world_size: int, stage: int, tier: str, unit_min: int) -> str:
    """What is wrong with a script's run on ``world_size`` ranks, "" for nothing."""
    wanted = user_scripts.run_plain(name)
    results = run_ranks(user_scripts.run_sharded, world_size, name, stage, tier, unit_min, timeout=60)
    refusals = [refusal for refusal, _ in results]
    if any(refusals):
        return "" if all(refusals) and all(map(is_named, refusals)) else f"refused: {refusals}"
    for rank, (_, values) in enumerate(results):
        for key, value in wanted.items():
            difference = float((values[key] - value).abs().nan_to_num(nan=float("inf")).max())
            if difference > TOLERANCE:
                return f"rank {rank}: '{key}' is {difference:.1e} off"
    return ""


def is_named(refusal: str) -> bool:
    """Whether a refusal is ours, or torch's own for a write to a released parameter."""
    kind = refusal.split(":")[0]
    ours = kind in ("EditRefusedError", "PartitionError", "ReleasedParameterError", "NonFiniteGradientError")
    ours |= kind == "UsageError"
    return ours or "more than one element of the written-to tensor" in refusal


@pytest.mark.soak
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_scripts_of_known_methods_on_two_ranks(stage: int) -> None:
    complaints = {name: complaint(name, 2, stage, "device", 1) for name in user_scripts.SCRIPTS}
    assert not any(complaints.values()), {name: text for name, text in complaints.items() if text}


@pytest.mark.soak
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("tier", ("device", "cpu"))
@pytest.mark.parametrize("unit_min", (1, 100_000))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("name", list(user_scripts.SCRIPTS))
def test_scripts_of_known_methods(name: str, stage: int, unit_min: int, tier: str, world_size: int) -> None:
    assert complaint(name, world_size, stage, tier, unit_min) == ""
