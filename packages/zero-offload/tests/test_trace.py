"""What moved, how fast, how much of it nobody waited for, and a file that a viewer can open."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
import torch
from shards import Lender, one_step, plans, update_of

from zero_offload import NvmeStore, TierOptions, Trace, offload_activations


def test_busy_time_is_the_union_and_waiting_is_not_hidden() -> None:
    now, done = [10.0], threading.Event()
    trace = Trace(clock=lambda: now[0])
    trace.follow("read", "a", 500, done.wait)
    now[0] = 10.25
    trace.follow("read", "b", 500, done.wait)
    with trace.span("read", "a", waiting=True):
        now[0] = 10.5
        done.set()
        (row,) = trace.report()
    assert (row.hop, row.nbytes, row.busy_s, row.waited_s) == ("read", 1000, 0.5, 0.0)
    (row,) = trace.report()
    assert (row.busy_s, row.waited_s, row.hidden, row.bandwidth) == (0.5, 0.25, 0.5, 2000.0)
    trace.close()


@pytest.mark.parametrize("kind", [OSError, RuntimeError, SystemExit])
def test_a_transfer_that_fails_moves_nothing_and_those_after_it_are_recorded(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    trace = Trace()

    def fail() -> None:
        raise kind("no")

    trace.follow("read", "a", 500, fail)
    trace.follow("read", "b", 300, lambda: None)
    assert [(row.hop, row.nbytes) for row in trace.report()] == [("read", 300)]
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = {event["name"]: event["args"] for event in events if event["ph"] == "X"}
    assert told["a"]["bytes"] == 0 and "no" in told["a"]["failed"]
    assert told["b"] == {"bytes": 300}
    trace.clear()
    trace.close()


def test_a_sink_that_fails_is_an_error_of_whoever_waits() -> None:
    seen: list[str] = []

    def sink(hop: str, name: str, *_: object) -> None:
        seen.append(name)
        if name == "a":
            raise ValueError("the sink is full")

    trace = Trace(sink=sink)
    trace.follow("read", "a", 500, lambda: None)
    trace.follow("read", "b", 300, lambda: None)
    with pytest.raises(ValueError, match="the sink is full"):
        trace.report()
    assert trace.report()[0].nbytes == 800
    assert seen == ["a", "b"]
    trace.close()


def test_it_may_be_closed_while_transfers_begin() -> None:
    trace = Trace()
    count, threads = 300, 2

    def begin() -> None:
        for _ in range(count):
            trace.follow("read", "a", 1, lambda: None)

    beginning = [threading.Thread(target=begin) for _ in range(threads)]
    for thread in beginning:
        thread.start()
    while any(thread.is_alive() for thread in beginning):
        trace.close()
    trace.close()
    assert trace.report()[0].nbytes == count * threads
    assert not [thread for thread in threading.enumerate() if thread.name == "zero-offload trace"]


def test_a_step_over_nvme_is_accounted_to_the_byte(tmp_path: Path) -> None:
    trace = Trace(rank=3)
    tier_options = TierOptions(tier="nvme", path=tmp_path / "swap", sub_group_size=8192, buffer_count=3)
    with update_of(
        Lender(torch.bfloat16), plans(torch.bfloat16), tier_options, gradients="nvme", trace=trace
    ) as update:
        one_step(update, 0)
        trace.clear()
        written = update.bytes_written()
        one_step(update, 1)
        update.flush()
        rows = {row.hop: row for row in trace.report()}
        assert rows["states out"].nbytes + rows["gradients out"].nbytes == update.bytes_written() - written
        assert rows["states out"].nbytes == 12 * (29_088 + 13_001)
        assert rows["states in"].nbytes <= rows["states out"].nbytes  # what the ring still had is not read
        assert rows["gradients out"].nbytes == 4 * (29_088 + 13_056)
        assert "compute" in rows and rows["compute"].busy_s > 0
        assert all(hop in trace.table() for hop in rows)
    trace.save(tmp_path / "trace.json")
    check_file(tmp_path / "trace.json", {"states in", "states out", "gradients in", "gradients out", "compute"})
    trace.close()


def test_shards_are_traced(tmp_path: Path) -> None:
    trace = Trace()
    with NvmeStore(tmp_path, device="cpu", buffer_count=1, trace=trace) as store:
        store.put("a", torch.zeros(10_000))
        store.put("b", torch.zeros(10_000))
        store.acquire("a")
        store.release("a", dirty=False)
        assert {row.hop: row.nbytes for row in trace.report()} == {"shards in": 40_000, "shards out": 80_000}
        trace.stop()
        store.acquire("b")
    assert {row.hop: row.nbytes for row in trace.report()} == {"shards in": 40_000, "shards out": 80_000}
    trace.close()


def test_activations_are_traced(tmp_path: Path) -> None:
    trace = Trace()
    layer = torch.nn.Linear(100, 100)
    with offload_activations(layer, tier="nvme", path=tmp_path, min_bytes=1, trace=trace) as offload:
        loss = layer(torch.randn(50, 100)).square().sum()
    loss.backward()
    offload.flush()
    moved = {row.hop: row.nbytes for row in trace.report()}
    assert moved["activations in"] == moved["activations out"] == 2 * 50 * 100 * 4
    offload.close()
    trace.close()


def check_file(path: Path, hops: set[str]) -> None:
    """The trace event format: complete events on named rows, none of which overlap in a row."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in complete} >= hops
    assert {event["pid"] for event in events} == {3}
    for row, name in rows.items():
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == row)
        assert own, name
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(own))
