"""The simulated accelerator: its memory, its streams, its stops and its races. Compiled by the first test that runs."""

from __future__ import annotations

import ctypes
import os
import signal
from multiprocessing import get_context

import pytest
import simulated_cases as cases
import torch
import torch.distributed as dist
from simulated_accelerator import configure, load
from simulated_accelerator.build import library
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles


def read_memory() -> None:
    load()
    x = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 4)


def test_host_may_not_touch_the_memory() -> None:
    library()
    process = get_context("forkserver").Process(target=read_memory)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGSEGV


def late() -> list[bool]:
    event = torch.Event("sim")
    x = torch.zeros(4, device="sim")
    cases.keep_busy()
    x.add_(1)
    event.record()
    before = event.query()
    event.synchronize()
    return [before, event.query(), bool((x == 1).all())]


def test_operations_run_later() -> None:
    assert run_simulated(late, 1) == [[False, True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_is_the_cpus(dtype: torch.dtype) -> None:
    theirs = run_simulated(cases.trained, 1, "cpu", dtype)[0]
    ours = run_simulated(cases.trained, 1, "sim", dtype)[0]
    assert ours["losses"] == theirs["losses"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name != "losses")


@pytest.mark.parametrize("case", cases.RACES)
def test_planted_race_is_found(case: str) -> None:
    report = run_simulated(cases.watched, 1, case)[0]
    names = cases.RACES[case][1]
    found = [race for race in report.races if {race.first.operation, race.second.operation} == names]
    assert found, "\n".join(map(str, report.races)) or "no race"
    for access in (found[0].first, found[0].second):
        assert access.place[0].file == cases.__file__
        assert access.place[0].function == case
    assert found[0].first.by != found[0].second.by


def test_every_stop_of_the_host_is_reported_with_its_line() -> None:
    report, expected = run_simulated(cases.every_stop, 1)[0]
    by_line: dict[int, set[str]] = {}
    for stop in report.stops:
        assert stop.place[0].file == cases.__file__
        by_line.setdefault(stop.place[0].line, set()).add(stop.what)
    assert {line: what in by_line.get(line, set()) for line, what in expected.items()} == dict.fromkeys(expected, True)


def test_training_step_without_a_stop_or_a_race() -> None:
    report = run_simulated(cases.no_stop, 1)[0]
    assert [str(stop) for stop in report.stops] == []
    assert [str(race) for race in report.races] == []


def test_pinned_memory_that_is_reused_too_early_gives_wrong_values() -> None:
    in_time, too_early = run_simulated(cases.reused_too_early, 1)[0]
    assert in_time == 1 << 20
    assert too_early < 1 << 20


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(1000), marks=pytest.mark.soak)], ids=len)
def test_correct_programs_have_no_race_and_the_cpus_values(seeds: range) -> None:
    assert run_simulated(cases.random_programs, 1, seeds, True)[0] == [(0, True)] * len(seeds)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(200), marks=pytest.mark.soak)], ids=len)
def test_programs_that_leave_out_waits_race(seeds: range) -> None:
    found = run_simulated(cases.random_programs, 1, seeds, False)[0]
    assert all(races > 0 for races, _ in found)


def collectives() -> tuple[list[float], int]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((6,), float(rank + 1), device="sim")
    configure(seed=7)
    with cases.watch() as report:
        gathered = torch.empty(6 * world_size, device="sim")
        dist.all_gather_into_tensor(gathered, x, async_op=True).wait()
        summed = x.clone()
        dist.all_reduce(summed, op=dist.ReduceOp.AVG, async_op=True).wait()
        part = torch.empty(6 // world_size, device="sim")
        dist.reduce_scatter_tensor(part, x, async_op=True).wait()
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x)
        told = [gathered.sum(), summed.sum(), part.sum(), swapped.sum()]
    assert report.stops == [] and report.races == [], report
    return [value.item() for value in told], len(report.launches)


def test_collectives_order_streams_and_do_not_stop_the_host() -> None:
    total = [18.0, 9.0, 9.0, 9.0]
    assert run_simulated(collectives, 2) == [(total, 4)] * 2


def memory() -> dict[str, object]:
    settled = torch.accelerator.memory_allocated()
    x = torch.zeros(1 << 18, device="sim")
    held = torch.accelerator.memory_allocated() - settled
    address = x.data_ptr()
    del x
    again = torch.empty(1 << 18, device="sim")
    (side,) = cases.streams(1)
    again.record_stream(side)
    with side:
        cases.keep_busy()
    reused = again.data_ptr() == address
    del again
    other = torch.empty(1 << 18, device="sim")
    configure(capacity=1 << 21)
    try:
        torch.empty(1 << 22, device="sim")
    except torch.OutOfMemoryError as error:
        refused = str(error)
    configure(capacity=1 << 33)
    return {"held": held, "reused": reused, "waited": other.data_ptr() != address, "refused": refused}


def test_freed_memory_is_reused_at_once_unless_it_was_recorded_on_a_stream() -> None:
    found = run_simulated(memory, 1)[0]
    refused = found.pop("refused")
    assert found == {"held": 1 << 20, "reused": True, "waited": True}
    assert "the simulated accelerator has 2097152 bytes" in refused


def generators() -> list[bool]:
    torch.manual_seed(5)
    state = torch.sim.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(100, device="sim")), torch.randn(10, device="sim")
    torch.sim.set_rng_state(state)
    second = torch.nn.functional.dropout(torch.ones(100, device="sim")), torch.randn(10, device="sim")
    third = torch.randn(10, device="sim")
    own = torch.randn(10, device="sim", generator=torch.Generator("sim").manual_seed(5))
    return [
        *(torch.equal(x, y) for x, y in zip(first, second, strict=True)),
        not torch.equal(second[1], third),
        not torch.equal(own, third),
        0 < int((first[0] == 0).sum()) < 100,
    ]


def test_random_numbers_follow_the_devices_generator() -> None:
    assert run_simulated(generators, 1)[0] == [True] * 5


def autocast() -> list[str]:
    model = torch.nn.Linear(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        hidden = model(torch.ones(2, 4, device="sim"))
        loss = torch.nn.functional.cross_entropy(hidden, torch.zeros(2, dtype=torch.long, device="sim"))
    loss.backward()
    return [str(x.dtype) for x in (hidden, loss, model.weight.grad)]


def test_autocast_knows_the_device() -> None:
    assert run_simulated(autocast, 1)[0] == ["torch.bfloat16", "torch.float32", "torch.float32"]


def two_devices() -> list[object]:
    configure(devices=2)
    try:
        with torch.sim.device(1):
            x = torch.ones(8, device="sim")
        y = x.to("sim:0")
        return [str(x.device), str(y.device), float((y + 1).sum()), torch.accelerator.device_count()]
    finally:
        configure(devices=1)


def test_a_process_may_have_several_devices() -> None:
    assert run_simulated(two_devices, 1)[0] == ["sim:1", "sim:0", 16.0, 2]


def failed() -> str:
    configure(seed=0)
    x = torch.tensor([9], device="sim")
    torch.zeros(4, device="sim").index_select(0, x)
    try:
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return str(error)
    finally:
        load().take_failure()
    return "nothing was raised"


def test_failure_of_an_operation_is_raised_where_the_host_waits() -> None:
    assert "earlier than here" in run_simulated(failed, 1)[0]


def test_library_lies_outside_the_checkout(tmp_path: object) -> None:
    assert os.path.dirname(os.path.dirname(__file__)) not in str(library())


def test_pinned_memory_of_parked_states_is_used_again() -> None:
    first, second = run_simulated(cases.parked_twice, 1)[0]
    assert first == second and first[1]
