"""The highest moment of a dry run is that of a real run."""

from __future__ import annotations

import pytest
from peak_models import MODELS, PeakCase, batch_of, measure

from zero_comm import run_ranks
from zero_plan import plan


def check(cases: list[PeakCase], world_size: int) -> None:
    by_rank = run_ranks(measure, world_size, cases)
    for number, case in enumerate(cases):
        found = plan(case.build, case.config(), batch=batch_of(case.model), world_size=world_size)
        for planned in found.ranks:
            peak, measured = planned.peak, by_rank[planned.rank][number]
            assert peak.nbytes == pytest.approx(measured.nbytes, rel=0.005), (case, peak, measured)
            assert peak.activation_bytes == pytest.approx(measured.activation_bytes, rel=0.005), (case, peak, measured)
            assert (peak.phase, peak.place) == (measured.phase, measured.place), case
            states = [row for row in measured.owners if row.kind != "activations"]
            assert states and set(states) <= set(peak.owners), (case, peak, measured)
            assert sum(row.nbytes for row in peak.owners) <= peak.nbytes


def test_the_highest_moment_is_that_of_live_storages() -> None:
    check([PeakCase("convolutional", 2), PeakCase("gpt", 3, recompute=True, dtype="bf16")], 2)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("model", MODELS)
def test_the_highest_moment_for_every_model_stage_and_dtype(model: str, world_size: int) -> None:
    check(
        [
            PeakCase(model, stage, recompute, dtype)
            for stage in range(4)
            for recompute in (False, True)
            for dtype in ("fp32", "bf16")
        ],
        world_size,
    )
