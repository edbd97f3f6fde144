"""A rank whose process ends: the others hear it within seconds instead of waiting for ever."""

from __future__ import annotations

import os
import time

import pytest
import torch
from comm_ranks import engine_groups

from zero_comm import Message, RankFailure, Tag, run_ranks


def one_exits(waits_in: str) -> None:
    groups = engine_groups()
    groups.control.agree(Message("ready", "", 0))
    if groups.gather.rank == 1:
        os._exit(3)
    if waits_in == "exchange":
        groups.control.exchange(Message("forward", "model", 2))
    else:
        groups.gather.all_gather(torch.empty(8), torch.zeros(4), Tag("gather", "layer 3", 2)).wait()


@pytest.mark.parametrize("waits_in", ["exchange", "gather"])
def test_a_rank_that_exits_is_named_by_the_one_that_waits_for_it(waits_in: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(one_exits, 2, waits_in, timeout=60)
    assert "PeerError" in caught.value.failures[0] and "rank 1" in caught.value.failures[0]
    doing = "forward 'model' in step 2" if waits_in == "exchange" else "gather of 'layer 3' in step 2"
    assert doing in caught.value.failures[0]
    assert "ended without an answer" in caught.value.failures[1]
    assert time.monotonic() - begun < 40  # of which starting the two processes takes most
