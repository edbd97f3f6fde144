"""Buckets of weights between two programs: one sender, and the ranks of a server, which are threads here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from zero_comm import (
    CommError,
    PeerError,
    WeightBucket,
    WeightInfo,
    WeightReceiver,
    WeightSender,
    WeightSlice,
    bucket_offsets,
    bucket_views,
    describe_weights,
    plan_buckets,
    read_weights,
)

WEIGHTS = {
    "embedding": torch.arange(24, dtype=torch.float32).view(6, 4),
    "scale": torch.tensor(1.5, dtype=torch.float64),
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "empty": torch.empty(0),
    "up": torch.arange(32, dtype=torch.bfloat16).view(4, 8),
    "count": torch.tensor([7, 8], dtype=torch.int64),
}
INFOS = [WeightInfo(name, value.dtype, tuple(value.shape)) for name, value in WEIGHTS.items()]
TIMEOUT = timedelta(seconds=20)


def buckets(bound: int, closed: list[str] | None = None) -> Iterator[WeightBucket]:
    """The weights in buckets of one memory, as an engine yields them."""
    plan = plan_buckets(INFOS, bound)
    memory = torch.empty(max(bucket_offsets(infos)[1] for infos in plan), dtype=torch.uint8)
    try:
        for number, infos in enumerate(plan):
            bucket = WeightBucket(number, len(plan), infos, memory[: bucket_offsets(infos)[1]])
            for name, view in bucket:
                view.copy_(WEIGHTS[name])
            yield bucket
            memory.fill_(0xFF)
    finally:
        if closed is not None:
            closed.append("closed")


class Server:
    """The ranks of a server in this process: a call runs on all of them at once, each in a thread."""

    def __init__(self, *ranks: dict[str, Any]) -> None:
        self.loaded: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
        self.bytes = [0 for _ in ranks]
        self.calls: list[str] = []
        self._ranks = [
            WeightReceiver(self._loader(number), rank=number, timeout=TIMEOUT, **options)
            for number, options in enumerate(ranks)
        ]

    def _loader(self, number: int) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
        def load(weights: list[tuple[str, torch.Tensor]]) -> None:
            self.loaded[number].update({name: value.clone() for name, value in weights})
            self.bytes[number] += sum(value.nbytes for _, value in weights)

        return load

    def __getattr__(self, call: str) -> Callable[..., None]:
        def run(*args: Any) -> None:
            self.calls.append(call)
            with ThreadPoolExecutor(len(self._ranks)) as pool:
                for done in [pool.submit(getattr(rank, call), *args) for rank in self._ranks]:
                    done.result()

        return run


@pytest.mark.parametrize("bound", (1, 100, 10_000))
@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_every_rank_gets_every_weight_bit_by_bit(bound: int, ranks: int) -> None:
    server = Server(*[{}] * ranks)
    sender = WeightSender(server, ranks=ranks, timeout=TIMEOUT)
    for _ in range(2):
        sender.send(buckets(bound))
    sender.close()
    for loaded in server.loaded:
        assert list(loaded) == list(WEIGHTS)
        assert all(torch.equal(loaded[n], v) and loaded[n].dtype is v.dtype for n, v in WEIGHTS.items())
    updates = len(plan_buckets(INFOS, bound))
    once = ["start_weight_update", *["update_weights"] * updates, "finish_weight_update"]
    assert server.calls == ["init_weight_transfer_engine", *once, *once]


@pytest.mark.parametrize("bound", (1, 10_000))
def test_a_rank_that_wants_slices_gets_those_and_no_other_byte(bound: int) -> None:
    halves = [
        {"embedding": WeightSlice(0, 3 * rank, 3), "up": WeightSlice(1, 4 * rank, 4), "scale": None} for rank in (0, 1)
    ]
    server = Server({"needs": halves[0]}, {"needs": halves[1]}, {})
    sender = WeightSender(server, ranks=3, timeout=TIMEOUT)
    sender.send(buckets(bound))
    sender.close()
    for rank in (0, 1):
        loaded = server.loaded[rank]
        assert sorted(loaded) == ["embedding", "scale", "up"]
        assert torch.equal(loaded["embedding"], WEIGHTS["embedding"][3 * rank : 3 * rank + 3])
        assert torch.equal(loaded["up"], WEIGHTS["up"][:, 4 * rank : 4 * rank + 4])
        assert server.bytes[rank] == 3 * 4 * 4 + 4 * 4 * 2 + 8
    assert all(torch.equal(server.loaded[2][name], value) for name, value in WEIGHTS.items())


def test_a_weight_that_is_wanted_and_not_sent_is_named_at_the_end() -> None:
    server = Server({"needs": {"up": None, "absent": None}})
    sender = WeightSender(server, ranks=1, timeout=TIMEOUT)
    with pytest.raises(CommError, match="has not sent 'absent' \\(1 weights"):
        sender.send(buckets(10_000))


def test_a_slice_that_a_weight_does_not_have_ends_the_transfer_on_both_sides() -> None:
    server, closed = Server({"needs": {"up": WeightSlice(1, 4, 8)}}), []
    sender = WeightSender(server, ranks=1, timeout=TIMEOUT)
    with pytest.raises(ValueError, match=r"weight 'up' of shape \(4, 8\) has no slice"):
        sender.send(buckets(10_000, closed))
    assert closed == ["closed"]


def test_a_server_that_fails_while_it_loads_is_named_and_the_buckets_are_closed() -> None:
    server, closed = Server({}, {}), []
    sender = WeightSender(server, ranks=2, timeout=TIMEOUT)
    server._ranks[1]._load = lambda weights: weights[0][1].view(-7)
    with pytest.raises(RuntimeError, match="-7"):
        sender.send(buckets(100, closed))
    assert closed == ["closed"]
    with pytest.raises(CommError, match="start_weight_update"):
        server.finish_weight_update()


def test_a_server_that_refuses_a_bucket_does_not_leave_the_sender_waiting() -> None:
    server = Server({"max_bucket_bytes": 64})
    sender = WeightSender(server, ranks=1, timeout=timedelta(minutes=10))
    with pytest.raises(ValueError, match="larger than max_bucket_bytes=64"):
        sender.send(buckets(10_000))


def test_a_failure_of_the_trainer_frees_the_server_which_takes_the_next_trainer() -> None:
    server = Server({})
    first = WeightSender(server, ranks=1, timeout=TIMEOUT)

    def failing() -> Iterator[WeightBucket]:
        yield next(buckets(100))
        raise KeyError("a gather failed")

    with pytest.raises(KeyError):
        first.send(failing())
    server._ranks[0].close()
    second = WeightSender(server, ranks=1, timeout=TIMEOUT)
    second.send(buckets(100))
    second.close()
    assert torch.equal(server.loaded[0]["count"], WEIGHTS["count"])


def test_calls_out_of_order_are_refused() -> None:
    alone = WeightReceiver(lambda weights: None)
    with pytest.raises(CommError, match="init_weight_transfer_engine first"):
        alone.start_weight_update()
    with pytest.raises(CommError, match="start_weight_update first"):
        alone.update_weights(describe_weights(INFOS))
    with pytest.raises(ValueError, match="rank_offset"):
        alone.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})
    with pytest.raises(ValueError, match="would be rank 2 of 2"):
        alone.init_weight_transfer_engine(
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 2, "world_size": 2}
        )


def test_a_sender_whose_server_refuses_says_so_and_does_not_wait() -> None:
    class Refusing(Server):
        def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
            raise PeerError("not now")

    with pytest.raises(PeerError, match="not now"):
        WeightSender(Refusing({}), ranks=1, timeout=timedelta(minutes=10)).send(buckets(100))


def test_a_server_with_fewer_ranks_than_the_sender_expects_is_named() -> None:
    class Idle(Server):
        def init_weight_transfer_engine(self, told: dict[str, Any]) -> None:
            """Take the connection, and have no rank join."""

    with pytest.raises(PeerError, match="2 ranks of it have not come"):
        WeightSender(Idle({}), ranks=2, timeout=timedelta(minutes=10)).send(buckets(100))


def test_arithmetic_of_buckets() -> None:
    for bound in (1, 17, 64, 100, 10_000):
        plan = plan_buckets(INFOS, bound)
        assert [info for infos in plan for info in infos] == INFOS
        assert all(len(infos) == 1 or bucket_offsets(infos)[1] <= bound for infos in plan)
        for infos in plan:
            views = bucket_views(infos, torch.zeros(bucket_offsets(infos)[1], dtype=torch.uint8))
            assert [(v.dtype, tuple(v.shape)) for v in views] == [(i.dtype, i.shape) for i in infos]
    assert plan_buckets([], 1) == [] and bucket_offsets([]) == ([], 0)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan_buckets(INFOS, 0)
    assert read_weights(describe_weights(INFOS)) == INFOS
    for wrong in ({}, {"names": ["a"], "dtype_names": ["nn"], "shapes": [[1]]},
                  {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}):  # fmt: skip
        with pytest.raises(ValueError, match="weight"):
            read_weights(wrong)
