"""Group the tensors that one native call updates.

A plan divides the parameters of one group into cohorts, which share step number and dtypes. Looking up the Python
attributes of thousands of tensors costs more than their arithmetic, so a plan is kept between steps, and each step only
checks that it still describes the group. Addresses are those of memory, valid while the tensors keep their storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

import torch

from .._types import Dtype
from ._formats import BLOCK, local

__all__ = ["Cohort", "CohortPlan", "addresses", "gradients", "adjacent_runs"]

_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the memory addresses of the tensors' first elements, valid while they keep their storage."""
    return list(map(_data_ptr, tensors))


def adjacent_runs(numbers: Iterable[int], positions: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive ``numbers`` whose tensors are adjacent, so that one call, which counts elements from
    the first tensor's position, has the right position of each; one empty run if there are no numbers.

    ``positions``, ``sizes``: by number, the global index of a tensor's first element, and its elements. A tensor is
    adjacent to the one before it if it begins at the first multiple of a block (256 elements) behind that one's end.
    """
    run: list[int] = []
    for number in numbers:
        if run and positions[number] != positions[run[-1]] + -(-sizes[run[-1]] // BLOCK) * BLOCK:
            yield run
            run = []
        run.append(number)
    yield run


def gradients(params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter, in order; None for a parameter without one."""
    return [p.grad for p in params]


@dataclass
class Cohort:
    """Parameters that one native call updates, with their state, as lists in one order. Gradients are passed per step.

    ``sharded``: the parameters are DTensors. ``tensors``: the state's tensors by name; ``pointers``: their addresses;
    ``sizes``: elements of each parameter (of this rank's shard).
    """

    params: list[torch.Tensor]
    param_dtype: Dtype
    grad_dtype: torch.dtype
    sharded: bool
    states: list[dict[str, Any]]
    names: tuple[str, ...]  # keys of the tensors in each state that the kernel reads
    step: torch.Tensor  # steps taken; one tensor that all states share, which `state_dict` copies for each
    first: bool  # the moments were created for this step
    position: int  # global index of the first parameter's first element, for random numbers
    tensors: dict[str, list[torch.Tensor]] = field(init=False)
    pointers: dict[str, list[int]] = field(init=False)
    sizes: list[int] = field(init=False)
    param_pointers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Look up the state's tensors and all addresses and sizes, and keep them."""
        self.tensors = {name: [state[name] for state in self.states] for name in self.names}
        self.pointers = {name: addresses(map(local, tensors)) for name, tensors in self.tensors.items()}
        locals_ = self.locals()
        self.sizes = [p.numel() for p in locals_]
        self.param_pointers = addresses(locals_)

    def locals(self) -> list[torch.Tensor]:
        """Return this rank's shards of the parameters, which are the parameters themselves unless they are DTensors."""
        return [local(p) for p in self.params] if self.sharded else self.params

    def is_current(self) -> bool:
        """Return whether what was looked up still holds: the parameters have the same addresses, and their states the
        same tensors."""
        if addresses(self.locals()) != self.param_pointers:
            return False
        return all(all(map(is_, map(itemgetter(name), self.states), tensors)) for name, tensors in self.tensors.items())

    def grad_pointers(self, grads: list[torch.Tensor]) -> list[int] | None:
        """Return the addresses of ``grads``, the parameters' gradients in the cohort's order (of this rank's shards);
        None when one is not contiguous or not of the cohort's dtype."""
        if self.sharded:
            grads = [local(g) for g in grads]
        if not all(map(_is_contiguous, grads)) or {g.dtype for g in grads} != {self.grad_dtype}:
            return None
        return addresses(grads)


@dataclass
class CohortPlan:
    """The cohorts of one parameter group, whose parameters are ``params``; ``cohort_of``: index of each parameter's
    cohort, -1 without a gradient.
    """

    params: list[torch.Tensor]
    cohort_of: list[int]
    cohorts: list[Cohort]
    absent: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        """Set `absent`: for each parameter, whether it has no gradient."""
        self.absent = [index < 0 for index in self.cohort_of]

    def grad_pointers(self, params: list[torch.Tensor], grads: list[torch.Tensor | None]) -> list[list[int]] | None:
        """Return the gradients' addresses for each cohort; None when the plan no longer describes the group, so that a
        new plan is needed.

        That is when the group has other parameters, other parameters lack a gradient, states were replaced, memory
        moved, or a gradient has another dtype or strides.
        """
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return None
        if [g is None for g in grads] != self.absent:
            return None
        result: list[list[int]] = []
        for index, cohort in enumerate(self.cohorts):
            own = (
                grads
                if len(cohort.params) == len(grads)
                else [g for g, at in zip(grads, self.cohort_of, strict=True) if at == index]
            )
            pointers = cohort.grad_pointers(own)  # type: ignore[arg-type]
            if pointers is None or not cohort.is_current():
                return None
            result.append(pointers)
        return result
