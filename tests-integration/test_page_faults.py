"""A step on a CPU uses the memory of the step before it: the system has no page to clear."""

from __future__ import annotations

from typing import Any

import pytest
from bench_kept_memory import Steps, measured

from zero_offload import malloc

MOST = 1_000
"""Page faults of a step in steady state."""
SMALL = {"layers": 6, "width": 256, "vocabulary": 16_000, "steps": 10}
LARGE = {"layers": 24, "width": 1024, "vocabulary": 32_000, "steps": 12}
pytestmark = pytest.mark.skipif(not malloc.is_tunable(), reason="the C library's allocator is tuned, or cannot be")


def run(shape: dict[str, Any], stage: int, ranks: int, **more: Any) -> list[Steps]:
    settings = {"zero_optimization": {"stage": stage}, **more}
    return measured({**shape, "settings": settings}, "-m", "zero_launch", "--nproc", str(ranks))


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        (0, 1),
        (3, 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2))),
    ],
)
def test_a_step_in_steady_state_has_hardly_a_page_fault(
    stage: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = run(SMALL, stage, ranks)
    assert len(kept) == ranks and max(rank.faults for rank in kept) <= MOST, kept
    if ranks == 1:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # a huge page hides 511 faults of memory that comes anew
        returned = run(SMALL, stage, ranks, keep_freed_memory=False)
        assert min(rank.faults for rank in returned) > 5 * MOST, returned


@pytest.mark.soak
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_of_four_hundred_million_parameters(stage: int) -> None:
    kept = run(LARGE, stage, 1)
    print(stage, kept)
    assert kept[0].faults <= MOST
