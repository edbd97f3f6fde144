"""The state that an optimizer without a kernel keeps for a parameter, found by stepping a copy on a small tensor."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["ProbedStates", "copy_of", "number_tensor", "plain_step", "probe_states"]

_STEP = "step"
_ELEMENTS = 6
_OF_SCHEDULES = frozenset([_STEP, "_opt_called", "_step_count"])  # attributes that torch's schedules set
_OF_TORCH = frozenset(["defaults", "param_groups", "state"])


@dataclass(frozen=True)
class ProbedStates:
    """The state that an optimizer keeps for a parameter. ``moments``: the names of tensors of the parameter's shape.
    ``numbers``: 0-D tensors or Python numbers by name, as examples of the types that the optimizer gives them.
    ``count``: an example of its ``step``, which is not among ``numbers``; None if it keeps none.
    """

    moments: tuple[str, ...]
    numbers: Mapping[str, Any]
    count: Any


def copy_of(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], group: Mapping[str, Any]) -> Any:
    """Return a copy of ``optimizer``, with its attributes but without states and hooks, over ``params`` in one param
    group with the options of ``group``."""
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    own = {"state": defaultdict(dict), "param_groups": [{**options, "params": params}]}
    made: Any = type(optimizer).__new__(type(optimizer))
    made.__setstate__({**optimizer.__getstate__(), **own})  # torch looks at the states, which a tier may not show now
    for name in vars(optimizer).keys() - vars(made).keys() - _OF_SCHEDULES:  # torch copies none of its own attributes
        value = vars(optimizer)[name]
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            setattr(made, name, copy.copy(value))
    return made


def number_tensor(value: Any) -> torch.Tensor:
    """Return a number as a 0-D tensor of the same value, a Python float in float64; a tensor is returned itself."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Step ``optimizer`` without its hooks, which belong to the user's own step, and without the wrapper that a
    learning-rate schedule puts around ``step``.
    """
    step: Callable[..., Any] = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


def probe_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> ProbedStates:
    """Return the state that ``optimizer`` keeps of a parameter with the options of the param group ``group``, found by
    two steps of a copy.

    ValueError for an optimizer that a tier cannot step: it fails, keeps other values than ``step``, numbers and tensors
    of the parameter's shape and dtype, makes some of them later than in its first step, or changes its attributes or
    its param group in a step.
    """
    kind = type(optimizer).__name__
    parameter = nn.Parameter(torch.linspace(-1.0, 1.0, _ELEMENTS))
    probe = copy_of(optimizer, [parameter], group)
    before = _own_values(probe)
    try:
        first, second = _kept_after_step(probe, parameter), _kept_after_step(probe, parameter)
    except Exception as error:
        raise ValueError(f"{kind} failed on a small probe: {error}") from error
    changed = sorted(name for name, value in _own_values(probe).items() if before.get(name, probe) != value)
    if changed:
        raise ValueError(f"{kind} changes '{changed[0]}' in a step, which the slices of a tier would do several times")
    if late := sorted(second - first):
        raise ValueError(
            f"{kind} makes '{late[0]}' in its second step, not in the first, where a tier makes all that it keeps of a "
            "parameter"
        )
    moments: list[str] = []
    numbers: dict[str, Any] = {}
    for name, value in probe.state[parameter].items():
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
            numbers[name] = value
        elif isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype):
            moments.append(name)
        elif value is not None:
            told = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if torch.is_tensor(value) else repr(value)
            raise ValueError(f"{kind} keeps '{name}' of a parameter, {told}, which a tier has no room for")
    count = numbers.pop(_STEP, None)
    if count is not None and float(count) != 2.0:
        raise ValueError(f"{kind} keeps a 'step' of {float(count)} after two steps, which a tier counts itself")
    return ProbedStates(tuple(moments), numbers, count)


def _kept_after_step(probe: Any, parameter: nn.Parameter) -> set[str]:
    """Step ``probe``, an optimizer over ``parameter``, with some gradient; return the names of the states that it keeps
    of the parameter now.
    """
    parameter.grad = parameter.detach().cos()
    plain_step(probe)
    return {name for name, value in probe.state[parameter].items() if value is not None}


def _own_values(optimizer: Any) -> dict[str, Any]:
    """Return the repr() of each attribute of an optimizer and of each option of its first param group, by name;
    comparing two results tells what a step changed. Attributes of torch and of schedules, and ``params``, are left out.
    """
    ours = {name: value for name, value in vars(optimizer).items() if not name.startswith("_optimizer_")}
    attributes = {name: value for name, value in ours.items() if name not in _OF_TORCH | _OF_SCHEDULES}
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return {name: repr(value) for name, value in {**attributes, **options}.items()}
