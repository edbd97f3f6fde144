"""Which heads go where, counted by hand and by enumeration."""

from __future__ import annotations

import pytest

from zero_sequence import SequenceError
from zero_sequence.heads import plan_heads


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(12, 12), (12, 6), (12, 4), (12, 3), (12, 2), (12, 1), (8, 2)])
def test_every_query_head_meets_its_own_key_head(query_heads: int, key_heads: int, ranks: int) -> None:
    plan = plan_heads(query_heads, key_heads, ranks, pad=True)
    assert plan.query_heads * ranks == query_heads + plan.padding
    assert len(plan.sent) == plan.key_heads * ranks
    for head in range(query_heads):
        rank, number = divmod(head, plan.query_heads)
        even = number * plan.key_heads // plan.query_heads
        place = even if plan.places is None else plan.places[rank][number]
        assert plan.sent[rank * plan.key_heads + place] == head // (query_heads // key_heads)


@pytest.mark.parametrize(
    ("query_heads", "key_heads", "ranks", "sent"), [(8, 4, 2, 4), (8, 2, 4, 4), (8, 1, 8, 8), (12, 6, 4, 8)]
)
def test_no_rank_gets_more_key_heads_than_it_needs(query_heads: int, key_heads: int, ranks: int, sent: int) -> None:
    assert len(plan_heads(query_heads, key_heads, ranks).sent) == sent


def test_heads_that_do_not_divide_are_refused_with_what_would() -> None:
    with pytest.raises(
        SequenceError, match=r"6 attention heads do not spread over 4 ranks.*\[1, 2, 3, 6\].*2 heads of"
    ):
        plan_heads(6, 6, 4)
    with pytest.raises(SequenceError, match="expected key heads that divide the 6 query heads, got 4"):
        plan_heads(6, 4, 2)
