"""Every element is written exactly once, by a rank that has it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ckpt.plan import Holding, make_plan


@st.composite
def holdings(draw: st.DrawFn) -> tuple[list[Holding], int]:
    world_size = draw(st.integers(1, 4))
    found: list[Holding] = []
    counts = [0] * world_size
    for number in range(draw(st.integers(0, 4))):
        total = draw(st.integers(0, 40))
        cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=5))})
        for begin, end in pairwise(cuts):
            for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
                found.append(Holding(f"t{number}", "param", (total,), "F32", begin, end - begin, rank, counts[rank]))
                counts[rank] += 1
    return found, world_size


@given(holdings())
@settings(max_examples=300, deadline=None)
def test_each_element_is_assigned_once_to_a_rank_that_holds_it(case: tuple[list[Holding], int]) -> None:
    found, world_size = case
    plan = make_plan(found, world_size)
    by_index = {(holding.rank, holding.index): holding for holding in found}
    written: dict[str, list[int]] = {holding.name: [] for holding in found}
    for rank, pieces in enumerate(plan.pieces):
        for piece in pieces:
            holding = by_index[rank, piece.index]
            assert holding.offset <= piece.offset
            assert piece.offset + piece.length <= holding.offset + holding.length
            written[holding.name].extend(range(piece.offset, piece.offset + piece.length))
    for name, shape in {(holding.name, holding.shape) for holding in found}:
        assert sorted(written[name]) == list(range(shape[0]))
