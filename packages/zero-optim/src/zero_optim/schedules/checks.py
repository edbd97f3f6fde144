"""Check that an object can drive an optimizer's learning rates."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

__all__ = ["schedule_problem"]

_METHODS = ("step", "get_last_lr", "state_dict", "load_state_dict")


def schedule_problem(made: Any, optimizer: Optimizer) -> str | None:
    """Return why ``made`` is no schedule of ``optimizer``, as the end of a sentence that begins with its name: it lacks
    methods, its ``step`` needs an argument, or it drives none of the optimizer's param groups. None if it is one."""
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        return f" is no schedule: {type(made).__name__} has no {', '.join(missing)}()"
    try:
        inspect.signature(made.step).bind()
    except TypeError as error:
        return (
            f": {type(made).__name__}.step() needs an argument ({error}), and the engine has none to give; "
            "keep that schedule outside of the engine and step it yourself"
        )
    driven = getattr(getattr(made, "optimizer", optimizer), "param_groups", optimizer.param_groups)
    if not {id(group) for group in driven} & {id(group) for group in optimizer.param_groups}:
        return (
            f": {type(made).__name__} drives other param groups than those of the engine's optimizer "
            f"({type(optimizer).__name__}), so it would change nothing; build it on that optimizer, or give a function"
        )
    return None
