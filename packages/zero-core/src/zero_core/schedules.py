"""Build the learning rate scheduler that the user gave or the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zero_core.errors import UsageError
from zero_optim import Scheduler, schedules
from zero_optim.schedules import VALID_LR_SCHEDULES
from zero_optim.schedules.checks import schedule_problem

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from zero_settings import Config, SchedulerSection


def stepping_with(lr_kwargs: object) -> Callable[[Scheduler], None]:
    """Return a function that calls a scheduler's ``step(**lr_kwargs)``; ``lr_kwargs``: a dict or None. Raises
    `UsageError` for anything else, such as the closure that torch's optimizers take."""
    if lr_kwargs is not None and not isinstance(lr_kwargs, Mapping):
        raise UsageError(
            f"engine.step: expected a dict of arguments for the learning rate schedule or nothing, got "
            f"{type(lr_kwargs).__name__}. A closure is not called: call engine(...), engine.backward(loss) and "
            "engine.step() one after the other. No step was taken."
        )
    arguments: Mapping[str, Any] = lr_kwargs or {}
    return lambda scheduler: scheduler.step(**arguments)


def build_scheduler(
    given: Scheduler | Callable[[Optimizer], Scheduler] | None, config: Config, optimizer: Optimizer | None
) -> Scheduler | None:
    """Return the user's scheduler, the one that the user's function makes, or the one that `config.scheduler` names, in
    this order; None if there is none of them. Raises `UsageError` without an optimizer, for a scheduler of another
    optimizer's param groups or whose ``step`` needs an argument, and when its class refuses the configured
    arguments."""
    section = config.scheduler
    if given is None and section is None:
        return None
    if optimizer is None:
        wanted = "lr_scheduler was given" if given is not None else "the configuration has a `scheduler` section"
        raise UsageError(f"{wanted}, but there is no optimizer for it to drive; give an optimizer or remove it")
    if given is None and section is not None:
        return _by_name(section, optimizer)
    if isinstance(given, type) or not isinstance(given, Scheduler):
        if not callable(given):
            raise UsageError(
                f"lr_scheduler: expected a schedule or a function of the optimizer, got {type(given).__name__}"
            )
        return _checked(given(optimizer), optimizer, "lr_scheduler: what the function returned")
    return _checked(given, optimizer, "lr_scheduler")


def _by_name(section: SchedulerSection, optimizer: Optimizer) -> Scheduler:
    """Return the scheduler of zero-optim or torch that ``section`` names, over ``optimizer``. Raises `UsageError` if
    there is none or it refuses its arguments."""
    name = section.type
    if name in VALID_LR_SCHEDULES:
        kind: Any = getattr(schedules, name)
        arguments = section.params.model_dump()  # with its nulls: for WarmupDecayLR null is not the default
    else:
        kind = getattr(torch.optim.lr_scheduler, name, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)):
            raise UsageError(
                f"scheduler.type: expected {', '.join(VALID_LR_SCHEDULES)} or a class of torch.optim.lr_scheduler, "
                f"got {name!r}"
            )
        arguments = section.params.kwargs()
    try:
        made = kind(optimizer, **arguments)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"scheduler.params: {name} refused {arguments}: {error}") from error
    return _checked(made, optimizer, f"scheduler.type {name!r}")


def _checked(made: Any, optimizer: Optimizer, what: str) -> Scheduler:
    """Return ``made`` if it is a schedule of ``optimizer``, else raise `UsageError`, which calls it ``what``."""
    if (problem := schedule_problem(made, optimizer)) is not None:
        raise UsageError(f"{what}{problem}")
    scheduler: Scheduler = made
    return scheduler
