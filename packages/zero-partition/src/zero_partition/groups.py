"""Checks of param groups after the engine was made: groups stay as they are, hyperparameters are alike on all ranks."""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .errors import STEP_DROPPED, PartitionError
from .optimizer_states import ListedParameter
from .partition import Partition

_TENSOR = operator.attrgetter("tensor")


class AddParamGroup:
    """Replaces `add_param_group` of an optimizer whose groups hold fragments: every call raises.

    It is in the optimizer's own ``__dict__`` until `remove`; pickles of the optimizer have the method of its class.
    ``partition``: that of the model, referred to weakly, as ``optimizer`` is.
    """

    def __init__(self, optimizer: Optimizer, partition: Partition) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._partition = weakref.ref(partition)
        optimizer.__dict__["add_param_group"] = self

    def __call__(self, param_group: dict[str, Any]) -> None:
        """Raise `PartitionError`, whatever ``param_group`` is, as parameters cannot be added after the engine was made.
        The error names the group's first parameter and says what to do instead."""
        given = param_group.get("params", ())
        first = given if isinstance(given, torch.Tensor) else next(iter(given), None)
        raise PartitionError(
            f"optimizer.add_param_group: {self._describe(first)} had no master, no gradient buffer and no state when "
            "the engine was made, and gets none now. Give all parameters that will be trained to the optimizer before "
            "initialize, while they require gradients, and call requires_grad_(False) on those whose turn comes "
            "later: until requires_grad_(True) they have no decay and no change of state, as in torch. Nothing was "
            "changed."
        )

    def remove(self) -> None:
        """Restore the optimizer's own method, unless the optimizer is gone or other code has replaced this one."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.__dict__.get("add_param_group") is self:
            del optimizer.__dict__["add_param_group"]

    def _describe(self, parameter: Any) -> str:
        """Return, for errors, the name of ``parameter``, or its shape if it is not the model's. ``parameter``: an entry
        of a param group, also as (name, parameter)."""
        if isinstance(parameter, tuple):
            parameter = parameter[-1]
        partition = self._partition()
        found = partition.find(parameter) if partition is not None else None
        if found is not None:
            return f"parameter '{found[0].names[found[1]]}'"
        return f"a parameter of shape {tuple(getattr(parameter, 'shape', ()))} that is not of the engine's model"


def check_groups(optimizer: Optimizer, expected: Sequence[Sequence[ListedParameter]]) -> None:
    """Raise `PartitionError` unless each of the optimizer's param groups holds the ``expected`` tensors in their order;
    the error names what was moved, removed or added. ``expected``: by group, its parameters."""
    groups = optimizer.param_groups
    if len(groups) == len(expected) and all(map(_holds_tensors, groups, expected)):
        return
    raise PartitionError(
        f"optimizer.param_groups was changed after initialize: {_describe_change(groups, expected)}. Gradients and "
        "states are kept by these places. Put it back and change hyperparameters instead, or give the parameter a "
        f"group of its own before initialize. {STEP_DROPPED}"
    )


def _holds_tensors(group: Mapping[str, Any], expected: Sequence[ListedParameter]) -> bool:
    """Return whether the param group ``group`` holds the tensors of the ``expected`` parameters, in their order."""
    held = group["params"]
    return len(held) == len(expected) and all(map(operator.is_, held, map(_TENSOR, expected)))


def _describe_change(groups: Sequence[Mapping[str, Any]], expected: Sequence[Sequence[ListedParameter]]) -> str:
    """Return, in words for an error, the first difference between the param ``groups`` and what they should hold, which
    must exist. ``expected``: by group, its parameters."""
    homes = {id(p.tensor): (number, p.name) for number, listed in enumerate(expected) for p in listed}
    seen: dict[int, int] = {}
    for number, group in enumerate(groups):
        for tensor in group["params"]:
            if id(tensor) not in homes:
                shape = tuple(tensor.shape)
                return f"param_groups[{number}] has a tensor of shape {shape} that initialize did not put there"
            home, name = homes[id(tensor)]
            if id(tensor) in seen:
                return f"parameter '{name}' is in param_groups[{seen[id(tensor)]}] and again in param_groups[{number}]"
            seen[id(tensor)] = number
            if number != home:
                return f"parameter '{name}' is in param_groups[{number}], expected in param_groups[{home}]"
    if missing := [place for tensor, place in homes.items() if tensor not in seen]:
        home, name = missing[0]
        return f"parameter '{name}' is no longer in param_groups[{home}]"
    if len(groups) != len(expected):
        return f"there are {len(groups)} groups, expected {len(expected)}"
    number = next(
        n for n, (group, listed) in enumerate(zip(groups, expected, strict=True)) if not _holds_tensors(group, listed)
    )
    return f"the parameters of param_groups[{number}] are in another order"


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[int, str], str]]:
    """Return ((index of the group, key), value as text) for each number, flag, name and tuple in the param ``groups``.

    A tensor of one element counts as a number if it is on the CPU, where reading it does not synchronise an
    accelerator.
    """
    return [
        ((number, key), repr(float(value)) if isinstance(value, torch.Tensor) else repr(value))
        for number, group in enumerate(groups)
        for key, value in group.items()
        if isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_cpu)
    ]


def hyperparameters_digest(groups: Sequence[Mapping[str, Any]]) -> int:
    """Return a 32-bit digest of the `hyperparameters` of the param ``groups``, to compare ranks by."""
    return zlib.crc32(repr(hyperparameters(groups)).encode())


_PLAIN = (int, float, str, tuple)
