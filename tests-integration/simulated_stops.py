"""Engines on the simulated accelerator whose stops of the host are counted, and what they do about wrong values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simulated_engines as engines
import torch
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
    *,
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


def written_placeholder(write: Callable[[nn.Parameter], object]) -> str:
    """Return the error of the steps after code has written into a released parameter."""
    import zero_partition

    engine = made(engines.config(3, "bf16"))
    engines.steps(engine, range(2))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        write(engine.module.blocks[1].up.weight)
    try:
        engines.steps(engine, range(2, 4))
    except zero_partition.ReleasedParameterError as error:
        return str(error)
    return "nothing was raised"


def by_alias(parameter: nn.Parameter) -> None:
    parameter.data.fill_(1.0)


def by_detached(parameter: nn.Parameter) -> None:
    parameter.detach().zero_()
