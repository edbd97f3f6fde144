"""Engines on the simulated accelerator whose stops of the host are counted, and what they do about wrong values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import simulated_engines as engines
import torch
import torch.distributed as dist
from simulated_accelerator import Report, configure, settle, watch
from torch import nn


def made(settings: dict[str, Any], optimizer: Callable[[Any], Any] | None = None) -> Any:
    """Return an engine on the device, with an optimizer of the script's if there is one."""
    import zero_core

    torch.manual_seed(0)
    model = engines.Model()
    given = None if optimizer is None else optimizer(model.parameters())
    return zero_core.initialize(model=model, optimizer=given, config=settings)[0]


def one_step(engine: Any, number: int, micro_batches: int = 1) -> None:
    for micro_batch in range(micro_batches):
        loss = engine(engines.batch(10 * number + micro_batch, "sim"))
        engine.backward(loss)
        engine.step()


def by_step(
    settings: dict[str, Any],
    numbers: range,
    ahead: bool = False,
    seed: int = 1,
    optimizer: Callable[[Any], Any] | None = None,
) -> list[Report]:
    """Return what is seen in each of the steps ``numbers``, after those before them.

    ``ahead``: the host does not wait for the device between steps.
    """
    configure(seed=seed)
    engine = made(settings, optimizer)
    micro_batches = settings.get("gradient_accumulation_steps", 1)
    for number in range(numbers.start):
        one_step(engine, number, micro_batches)
    found: list[Report] = []
    if ahead:
        with watch() as report:
            for number in numbers:
                one_step(engine, number, micro_batches)
        found.append(report)
    else:
        for number in numbers:
            settle()
            with watch() as report:
                one_step(engine, number, micro_batches)
            found.append(report)
    engine.destroy()
    return found


def written_placeholder(write: Callable[[nn.Parameter], object], trains: bool) -> str:
    """Return the error of the steps after code has written into a released parameter; ``trains``: after backward."""
    import zero_partition

    engine = made(engines.config(3, "bf16"))
    engines.steps(engine, range(2))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        write(engine.module.blocks[1].up.weight)
    try:
        if trains:
            engines.steps(engine, range(2, 4))
        else:
            for _ in range(3):
                engine.step()
    except zero_partition.ReleasedParameterError as error:
        return str(error)
    return "nothing was raised"


def by_alias(parameter: nn.Parameter) -> None:
    parameter.data.fill_(1.0)


def by_detached(parameter: nn.Parameter) -> None:
    parameter.detach().zero_()


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)


def looped_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


class Overflow(NamedTuple):
    """What came of a step with gradients that are not finite: the steps that raised, the last error, and whether
    weights and states were afterwards those from before it."""

    raised: list[int]
    message: str
    left_alone: bool
    skipped: int
    stops: list[int]


def overflow(settings: dict[str, Any], *, saves_in: str = "") -> Overflow:
    """Take six steps of which number 3 has infinite gradients on the last rank; ``saves_in``: save after it."""
    import zero_partition

    engine = made(settings)
    raised, message, stops = [], "", []
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    for number in range(6):
        if number == 3:
            before = held(engine)
        settle()
        with watch() as report:
            loss = engine(engines.batch(number, "sim"))
            bad = number == 3 and dist.get_rank() == dist.get_world_size() - 1
            engine.backward(loss * float("inf") if bad else loss)
            try:
                engine.step()
                if saves_in and number == 3:
                    engine.save_checkpoint(saves_in)
            except zero_partition.NonFiniteGradientError as error:
                raised.append(number)
                message = str(error)
        stops.append(len(report.stops))
        if number == 3:
            after = held(engine)
        if raised:
            break
    left_alone = all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    skipped = engine.skipped_steps
    engine.destroy()
    return Overflow(raised, message, left_alone, skipped, stops)


def held(engine: Any) -> list[torch.Tensor]:
    """Return copies of this rank's masters, weights and states."""
    sharded = engine.sharded_optimizer
    found = [fragment.tensor.detach() for fragment in sharded.fragments]
    found += [unit.flat for unit in engine.partition.units if unit.flat.untyped_storage().nbytes()]
    for fragment in sharded.fragments:
        found += [value for value in sharded.state_of(fragment).values() if isinstance(value, torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.detach().to("cpu", copy=True) for tensor in found]


def norms(settings: dict[str, Any], device: str) -> list[float]:
    """Return the norms of some steps, read after each of them."""
    import zero_core

    torch.manual_seed(0)
    engine = zero_core.initialize(model=engines.Model(), config=settings, device=device)[0]
    found = []
    for number in range(4):
        loss = engine(engines.batch(number, device))
        engine.backward(loss)
        engine.step()
        found.append(engine.get_global_grad_norm())
        assert engine.was_step_applied()
    engine.destroy()
    return found
