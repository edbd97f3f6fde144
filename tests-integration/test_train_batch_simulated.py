"""`Engine.train_batch` on the simulated accelerator, and over replicas: the bits of the ordinary loop, and no race."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import simulated_engines as engines
import torch
from simulated_accelerator import configure, settle, watch
from simulated_accelerator.ranks import run_simulated

pytestmark = pytest.mark.timeout(600)  # the first one compiles
MICRO_BATCHES, STEPS = 3, 4
ON_HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
EXACT = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu", "overlap": "exact"}}


class Found(NamedTuple):
    """Losses, weights and moments of each step's end, and the races that were seen."""

    losses: list[float]
    values: dict[str, torch.Tensor]
    races: list[str]


def trained(settings: dict[str, Any], unit_by_unit: bool, device: str = "sim") -> Found:
    """Take steps in one of both ways, on a device whose queues are late by random times."""
    import zero_core

    torch.manual_seed(0)
    engine = zero_core.initialize(model=engines.Model(), config=settings, device=device)[0]
    losses = []
    with watch() as report:
        for step in range(STEPS):
            configure(seed=step + 1, longest_delay=100)
            batches = [engines.batch(MICRO_BATCHES * step + number, device) for number in range(MICRO_BATCHES)]
            if unit_by_unit:
                losses.append(engine.train_batch(batches))
                continue
            total = torch.zeros((), device=device)
            for batch in batches:
                total = total + engine.backward(engine(batch))
                engine.step()
            losses.append(total)
    values = {}
    for name, parameter in engine.module.named_parameters():
        values[name] = engine.full_param(parameter).cpu()
        for key in ("exp_avg", "exp_avg_sq"):
            values[f"{name}/{key}"] = engine.full_state(parameter, key).cpu()
    found = Found([float(loss) for loss in losses], values, [str(race) for race in report.races])
    engine.destroy()
    return found


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bf16", ON_HOST),
    (1, "fp32", EXACT),
    (2, "fp32", {}),
    (2, "bf16", ON_HOST),
    (2, "bf16", EXACT),
    (2, "bf16", {"zero_hpz_partition_size": 2}),
    (4, "bf16", {"mics_shard_size": 2}),
    (4, "fp32", {"mics_shard_size": 2, "offload_optimizer": {"device": "cpu"}}),
    (4, "bf16", {"zero_hpz_partition_size": 2}),
    (4, "bf16", {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
]


@pytest.mark.parametrize(("ranks", "dtype", "zero"), CASES, ids=str)
def test_weights_and_moments_are_those_of_the_ordinary_loop(ranks: int, dtype: str, zero: dict[str, Any]) -> None:
    settings = {**engines.config(3, dtype, **zero), "gradient_accumulation_steps": MICRO_BATCHES}
    loop, by_unit = (run_simulated(trained, ranks, settings, way) for way in (False, True))
    for ours, theirs in zip(by_unit, loop, strict=True):
        assert ours.races == []
        assert ours.losses == theirs.losses
        assert [name for name, value in theirs.values.items() if not torch.equal(value, ours.values[name])] == []


def stops(settings: dict[str, Any]) -> list[str]:
    """What the host waits for in steps of a model whose units have buffers, once the engine knows it."""
    import zero_core

    torch.manual_seed(0)
    model = engines.Model()
    for block in model.blocks:
        block.register_buffer("table", torch.arange(4.0))
    engine = zero_core.initialize(model=model, config=settings)[0]
    found = []
    for step in range(12):
        batches = [engines.batch(MICRO_BATCHES * step + number, "sim") for number in range(MICRO_BATCHES)]
        settle()
        with watch() as report:
            engine.train_batch(batches)
        if step >= 9:
            found += [str(stop) for stop in report.stops]
    engine.destroy()
    return found


@pytest.mark.parametrize("zero", [{}, ON_HOST], ids=str)
def test_steps_have_no_stop(zero: dict[str, Any]) -> None:
    settings = {**engines.config(3, "bf16", **zero), "gradient_accumulation_steps": MICRO_BATCHES}
    for found in run_simulated(stops, 2, settings):
        # An update on the host needs the norm, for which it waits if the device has not sent it yet.
        assert [stop for stop in found if not (zero and "(_await_squares)" in stop)] == []
