"""The agreed orders: every rank computes the same one, and it holds everything that anyone used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_partition.ordered_gathers import GatherSchedule, merge_orders

ORDERS = st.lists(st.lists(st.integers(0, 12), max_size=12), max_size=5)


@given(ORDERS)
def test_the_merged_order_holds_every_unit_that_any_rank_used_exactly_once(orders: list[list[int]]) -> None:
    merged = merge_orders(orders)
    assert sorted(merged) == sorted({unit for order in orders for unit in order})


@given(ORDERS)
def test_rank_0s_order_is_kept(orders: list[list[int]]) -> None:
    merged = merge_orders(orders)
    first = list(dict.fromkeys(orders[0])) if orders else []
    assert [unit for unit in merged if unit in first] == first


@given(ORDERS)
def test_merging_what_is_merged_already_changes_nothing(orders: list[list[int]]) -> None:
    merged = merge_orders(orders)
    assert merge_orders([merged, *orders]) == merged == merge_orders([merged])


def test_a_unit_that_only_a_later_rank_used_follows_the_one_it_followed_there() -> None:
    assert merge_orders([[0, 1, 4], [0, 2, 4], [3, 0]]) == [3, 0, 2, 1, 4]


@given(order=st.permutations(list(range(8))), wanted=st.lists(st.integers(0, 9)))
def test_a_schedule_issues_each_unit_once_and_in_order_whatever_is_asked_for(
    order: list[int], wanted: list[int]
) -> None:
    schedule = GatherSchedule(order)
    issued: list[int] = []
    for unit in wanted:
        pending = schedule.pending_until(unit)
        if unit not in order or unit in issued:
            assert pending is None
        else:
            assert pending is not None and pending[-1] == unit
            issued += pending
            schedule.advance(len(pending))
        assert schedule.ahead(len(order)) == order[len(issued) :] and schedule.ahead(1) == order[len(issued) :][:1]
    assert issued == order[: len(issued)]
    schedule.restart()
    assert schedule.ahead(len(order)) == order
