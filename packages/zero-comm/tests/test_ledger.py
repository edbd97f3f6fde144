"""The ledger counts what this rank hands to the transport."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from comm_ranks import data_group, engine_groups

from zero_comm import Ledger, LedgerRow, Message, Tag, run_ranks

DTYPES = [torch.float32, torch.bfloat16]


def test_a_ledger_adds_up_calls_and_bytes_by_phase_and_name() -> None:
    ledger = Ledger()
    ledger.count(Tag("gather", "a", 0), 10)
    ledger.count(Tag("gather", "a", 1), 20, 12)
    ledger.count(Tag("reduce", "a", 1), 5)
    assert list(ledger) == [("gather", "a", LedgerRow(2, 30, 12)), ("reduce", "a", LedgerRow(1, 5))]
    assert (ledger.across_bytes(), ledger.across_bytes("gather"), ledger.across_bytes("reduce")) == (12, 12, 0)
    assert (ledger.sent_bytes(), ledger.sent_bytes("gather"), ledger.sent_bytes("publish")) == (35, 30, 0)
    assert (ledger.calls(), ledger.calls("gather"), ledger.calls("publish")) == (3, 2, 0)
    ledger.reset()
    assert list(ledger) == [] and ledger.sent_bytes() == 0


def traffic() -> list[dict[str, tuple[int, int]]]:
    return [traffic_of(dtype) for dtype in DTYPES]


def traffic_of(dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    ledger = Ledger()
    group = data_group(ledger)
    size, world_size = 24, group.world_size
    group.all_gather(
        torch.empty(size * world_size, dtype=dtype), torch.zeros(size, dtype=dtype), Tag("gather", "u")
    ).wait()
    group.reduce_scatter(torch.zeros(size * world_size, dtype=dtype), torch.empty(size), Tag("reduce", "u")).wait()
    group.broadcast(torch.zeros(size, dtype=dtype), 0, Tag("broadcast", "u")).wait()
    return {phase: (ledger.calls(phase), ledger.sent_bytes(phase)) for phase in ("gather", "reduce", "broadcast")}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gather_and_reduce_send_the_other_ranks_shards_and_no_byte_more(world_size: int) -> None:
    for rank, answers in enumerate(run_ranks(traffic, world_size)):
        for dtype, counted in zip(DTYPES, answers, strict=True):
            shard = 24 * dtype.itemsize
            if world_size == 1:
                assert counted == {"gather": (0, 0), "reduce": (0, 0), "broadcast": (0, 0)}
            else:
                assert counted["gather"] == counted["reduce"] == (1, shard * (world_size - 1))
                assert counted["broadcast"] == (1, shard if rank == 0 else 0)


def shared_book() -> tuple[int, int, int]:
    groups = engine_groups()
    groups.gather.ledger.reset()
    groups.gather.all_gather(torch.empty(8), torch.zeros(4), Tag("gather", "u")).wait()
    groups.reduce.reduce_scatter(torch.zeros(8), torch.empty(4), Tag("reduce", "u")).wait()
    groups.control.exchange(Message("step", "", 0))
    ledger = groups.gather.ledger
    return ledger.sent_bytes("gather"), ledger.sent_bytes("reduce"), ledger.calls("control")


def test_the_three_groups_of_an_engine_write_one_ledger() -> None:
    assert run_ranks(shared_book, 2) == [(16, 16, 1)] * 2


def waiting() -> tuple[tuple[float, float], tuple[float, float]]:
    group = data_group(ledger := Ledger())
    work = group.all_gather(torch.empty(2), torch.zeros(1), Tag("gather", "u"))
    store = dist.distributed_c10d._get_default_store()
    if group.rank == 0:  # it does something else, and then comes too
        store.wait(["rank 1 waits"])
        time.sleep(0.2)
    else:
        store.set("rank 1 waits", "")
    group.reduce_scatter(torch.zeros(2), torch.empty(1), Tag("reduce", "u")).wait()
    work.wait()
    return ledger.seconds("gather"), ledger.seconds("reduce")


def test_a_ledger_knows_how_long_collectives_were_open_and_waited_for() -> None:
    (gather_0, reduce_0), (gather_1, reduce_1) = run_ranks(waiting, 2)
    for open_seconds, waited in (gather_0, gather_1):
        assert open_seconds >= 0.2 and waited < open_seconds  # the gather was open while the reduction was waited for
    assert reduce_0[1] < reduce_1[1] <= reduce_1[0] and reduce_1[1] >= 0.15  # only rank 1 waited for the other
