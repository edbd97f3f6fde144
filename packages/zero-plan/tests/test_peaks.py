"""The peak of a dry run is that of a real run."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from peak_models import MODELS, PeakCase, measure

from zero_comm import run_ranks
from zero_plan import Peak, RankPlan, plan


def check(cases: list[PeakCase], world_size: int) -> None:
    by_rank = run_ranks(measure, world_size, cases)
    for number, case in enumerate(cases):
        found = plan(case.build, case.config(), batch=case.batch(), world_size=world_size)
        for planned in found.ranks:
            with pytest.raises(AssertionError) if case.planted else nullcontext():
                compare(case, planned, by_rank[planned.rank][number])


def compare(case: PeakCase, planned: RankPlan, found: tuple[Peak, ...]) -> None:
    peak, measured = planned.peak, found[0]
    assert peak.nbytes == pytest.approx(measured.nbytes, rel=0.005), (case, peak, measured)
    assert peak.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.005), (case, peak, measured)
    assert (peak.phase, peak.place) == (measured.phase, measured.place), case
    states = [row for row in measured.owners if row.kind != "activations"]
    assert states and set(states) <= set(peak.owners), (case, peak, measured)
    assert sum(row.nbytes for row in peak.owners) <= peak.nbytes
    assert planned.peaks[1:] == found[1:], case
    assert len(planned.peaks) == (1 if case.offload == "none" else 2)


def test_the_highest_moment_is_that_of_live_storages_and_memory_that_no_plan_knows_of_is_found() -> None:
    planted = PeakCase("convolutional", 2, planted=True)
    check([planted, planted._replace(planted=False), PeakCase("gpt", 3, True, "bf16", offload="all")], 2)


def test_images_of_a_16_bit_model_are_in_its_dtype() -> None:
    check([PeakCase("vit", 2, dtype="bf16")], 1)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("model", MODELS)
def test_the_highest_moment_for_every_model_stage_and_dtype(model: str, world_size: int) -> None:
    check(
        [
            PeakCase(model, stage, recompute, dtype, offload)
            for stage in range(4)
            for recompute in (False, True)
            for dtype in ("fp32", "bf16")
            for offload in ("none", "optimizer", "all")[: 1 + (stage > 0) + (stage > 2)]
        ],
        world_size,
    )
