"""Reductions over several replicas on the simulated accelerator: their hops run in streams of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import simulated_engines as engines
import simulated_stops as stops
import torch
from simulated_accelerator import Launch, Report, configure, watch
from simulated_accelerator.ranks import run_simulated

from zero_comm import EngineGroups, Group, Ledger, Mesh, QuantizedReduce, Tag, open_group
from zero_precision import BlockCodec

pytestmark = pytest.mark.timeout(600)  # the first one compiles
REPLICAS = {"mics_shard_size": 2}
CODED = {**REPLICAS, "zero_quantized_gradients": True}
NODES = {"zero_quantized_gradients": True}
COUNT, NUMEL = 3, 10


def open_groups(ledger: Ledger | None = None) -> EngineGroups:
    """Return the groups of two replicas over two ranks each."""
    return Mesh(shard_size=2, device=torch.device("sim", 0)).open_groups(ledger=ledger)


def start(groups: EngineGroups, wire: torch.dtype) -> list[tuple[torch.Tensor, Any]]:
    """Start several reductions without waiting for one; return their results and works."""
    started = []
    for number in range(COUNT):
        flat = torch.arange(float(NUMEL), device="sim").add(number + groups.control.rank).to(wire)
        out = torch.ones(NUMEL // 2, device="sim")
        tag = Tag("reduce", f"unit {number}")
        started.append((out, groups.reduce.reduce_scatter(flat, out, tag, accumulate=number > 0)))
    return started


def several(wire: torch.dtype) -> tuple[list[list[float]], Report, list[Launch]]:
    """Return the averages of several reductions in flight, what was seen, and the launches before the first wait."""
    configure(seed=3)
    groups = open_groups()
    with watch() as report:
        started = start(groups, wire)
        for _, work in started:
            work.advance()
        before_waits = torch.zeros((), device="sim")
        torch.distributed.all_reduce(before_waits)
        for _, work in started:
            work.wait()
    values = [out.tolist() for out, _ in started]
    groups.close()
    return values, report, report.launches


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_hops_between_replicas_keep_neither_compute_nor_the_next_reduction_waiting(wire: torch.dtype) -> None:
    for rank, (values, report, launches) in enumerate(run_simulated(several, 4, wire)):
        mine = [NUMEL / 2 * (rank % 2) + i + 1.5 for i in range(NUMEL // 2)]
        assert values == [mine, [x + 2 for x in mine], [x + 3 for x in mine]]
        assert [str(race) for race in report.races] == [] and report.stops == []
        *hops, computed = launches
        streams = dict.fromkeys(hop.stream for hop in hops)
        places = [[n for n, hop in enumerate(hops) if hop.stream == stream] for stream in streams]
        assert [len(numbers) for numbers in places] == [COUNT] * 3  # in the replica, between the replicas, and back
        for inside, across, back in zip(*places, strict=True):
            assert not set(hops[inside].behind) & {*places[1], *places[2]}
            assert inside in hops[across].behind and across in hops[back].behind
        assert computed.behind == ()


def several_coded() -> tuple[list[list[float]], Report, list[Launch]]:
    """Return the averages of several quantized reductions over two nodes of two ranks in flight, what was seen, and the
    launches before the first wait."""
    configure(seed=3)
    groups = Mesh(device=torch.device("sim", 0)).open_groups()
    rank = groups.control.rank
    rows = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    inside, across = (Group(open_group(row)) for row in rows)
    reduction = QuantizedReduce(inside, across, BlockCodec("int8", block=256))
    with watch() as report:
        started = []
        for number in range(COUNT):
            flat = torch.full((4 * NUMEL,), float(number + rank), device="sim")
            out = torch.ones(NUMEL, device="sim")
            started.append((out, reduction.reduce_scatter(flat, out, Tag("reduce", f"unit {number}"))))
        for _, work in started:
            work.advance()
        before_waits = torch.zeros((), device="sim")
        torch.distributed.all_reduce(before_waits)
        for _, work in started:
            work.wait()
    values = [out.tolist() for out, _ in started]
    for group in (inside, across, groups):
        group.close()
    return values, report, report.launches


def test_quantized_hops_keep_neither_compute_nor_the_next_reduction_waiting() -> None:
    for values, report, launches in run_simulated(several_coded, 4):
        for number, average in enumerate(values):
            assert average == pytest.approx([number + 1.5] * NUMEL, rel=0.01)
        assert [str(race) for race in report.races] == [] and report.stops == []
        *hops, computed = launches
        streams = dict.fromkeys(hop.stream for hop in hops)
        places = [[n for n, hop in enumerate(hops) if hop.stream == stream] for stream in streams]
        assert [len(numbers) for numbers in places] == [COUNT] * 2  # in the node, and between the nodes
        for inside, across in zip(*places, strict=True):
            assert not set(hops[inside].behind) & set(places[1]) and inside in hops[across].behind
        assert computed.behind == ()


def timed(times_devices: bool) -> tuple[tuple[float, float], int, int]:
    """Return the seconds of several reductions, how many are untimed, and the calls that sent bytes."""
    ledger = Ledger()
    ledger.times_devices = times_devices
    groups = open_groups(ledger)
    ledger.reset()
    ((_, work), *others) = start(groups, torch.float32)
    torch.mm(torch.ones(1500, 1500, device="sim"), torch.ones(1500, 1500, device="sim"))
    for one in (work, *[other for _, other in others]):
        one.wait()
    torch.accelerator.synchronize()
    found = ledger.seconds("reduce"), ledger.untimed("reduce"), ledger.calls("reduce")
    groups.close()
    return found


def test_seconds_waited_for_a_reduction_are_those_in_which_compute_stood_still() -> None:
    for (open_seconds, waited), untimed, calls in run_simulated(timed, 4, True):
        assert (untimed, calls) == (0, 3 * COUNT)
        assert waited < open_seconds / 4  # the device multiplied matrices meanwhile


def test_a_reduction_is_timed_as_one_and_its_hops_count_as_calls() -> None:
    for seconds, untimed, calls in run_simulated(timed, 4, False):
        assert (seconds, untimed, calls) == ((0.0, 0.0), COUNT, 3 * COUNT)


class Steps(NamedTuple):
    """Gradients of each step by parameter, and what was seen."""

    gradients: list[dict[str, torch.Tensor]]
    report: Report | None


def gradients(settings: dict[str, Any], device: str) -> Steps:
    """Return the averaged gradients of some steps of an engine."""
    import zero_core

    configure(seed=5)
    torch.manual_seed(0)
    engine = zero_core.initialize(model=engines.Model(), config=settings, device=device)[0]
    found = []
    with watch() as report:
        for step in range(3):
            engine.backward(engine(engines.batch(step, device)))
            found.append({n: engine.full_grad(p).detach().clone() for n, p in engine.module.named_parameters()})
            engine.step()
    engine.destroy()
    return Steps([{n: g.cpu() for n, g in one.items()} for one in found], None if device == "cpu" else report)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_over_replicas_are_the_cpus_bit_by_bit(stage: int, dtype: str) -> None:
    settings = engines.config(stage, dtype, **REPLICAS)
    settings["optimizer"]["params"]["torch_adam"] = True
    here = run_simulated(gradients, 4, settings, "sim")
    there = run_simulated(gradients, 4, settings, "cpu")
    for ours, theirs in zip(here, there, strict=True):
        assert [str(race) for race in ours.report.races] == []
        for mine, plain in zip(ours.gradients, theirs.gradients, strict=True):
            assert mine.keys() == plain.keys()
            assert [name for name, gradient in plain.items() if not torch.equal(gradient, mine[name])] == []


@pytest.mark.parametrize("zero", [REPLICAS, CODED, NODES], ids=["exact", "coded", "nodes"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_over_replicas_have_no_stop(stage: int, zero: dict[str, Any]) -> None:
    for reports in run_simulated(stops.by_step, 4, engines.config(stage, "bf16", **zero), range(9, 12)):
        assert [str(stop) for report in reports for stop in report.stops] == []
        assert [str(race) for report in reports for race in report.races] == []


@pytest.mark.parametrize("zero", [REPLICAS, CODED, NODES], ids=["exact", "coded", "nodes"])
@pytest.mark.parametrize("stage", [2, pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_no_delays_make_a_race_over_replicas(stage: int, zero: dict[str, Any]) -> None:
    settings = engines.config(stage, "bf16", **zero)
    assert run_simulated(engines.races_by_seed, 4, settings, range(6)) == [[]] * 4
