from __future__ import annotations

from pathlib import Path

import pytest

from zero_launch.orders import END, ORDERS_VARIABLE, REGROUP, Orders
from zero_launch.rank_files import RankFiles


@pytest.mark.parametrize("takes_orders", (False, True))
def test_only_ranks_of_jobs_that_can_be_asked_to_leave_have_a_folder_to_look_into(
    tmp_path: Path, takes_orders: bool
) -> None:
    files = RankFiles(tmp_path / "run", None, {}, recorders=tmp_path / "recorders", takes_orders=takes_orders)
    env = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    files.reify({0: env})
    assert (ORDERS_VARIABLE in env) is takes_orders
    assert files.orders.folder.exists() is takes_orders
    assert files.orders.answer(0) is None


def test_an_order_to_end_is_not_taken_back(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "orders")
    orders.give(END)
    orders.give(REGROUP)
    assert (orders.folder / "order").read_text() == END
