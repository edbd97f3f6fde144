"""Group the tensors that one native call updates.

A plan holds the cohorts of one parameter group: parameters that share step number and dtypes. Looking up Python
attributes of thousands of tensors costs more than their arithmetic, so a plan is kept between steps and only compared
with what it was made from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

import torch

from .._types import Dtype
from ._formats import BLOCK, local

__all__ = ["Cohort", "CohortPlan", "addresses", "gradients", "neighbours"]

_data_ptr = torch.Tensor.data_ptr
_is_contiguous = torch.Tensor.is_contiguous


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The addresses of the tensors' first elements."""
    return list(map(_data_ptr, tensors))


def neighbours(numbers: Iterable[int], positions: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Divide tensors, by number and in this order, into runs that one call lays out at their positions: each tensor
    begins at the first multiple of a block behind the one before it."""
    run: list[int] = []
    for number in numbers:
        if run and positions[number] != positions[run[-1]] + -(-sizes[run[-1]] // BLOCK) * BLOCK:
            yield run
            run = []
        run.append(number)
    yield run


def gradients(params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Each parameter's gradient, or None."""
    return [p.grad for p in params]


@dataclass
class Cohort:
    """Parameters that one native call updates, with their state."""

    params: list[torch.Tensor]
    param_dtype: Dtype
    grad_dtype: torch.dtype
    sharded: bool
    states: list[dict[str, Any]]
    names: tuple[str, ...]  # of the tensors in each state that the kernel reads
    step: torch.Tensor  # one for all; `state_dict` gives each its own
    first: bool  # no parameter has a momentum buffer yet
    position: int  # of the first element of all, which random numbers go by
    tensors: dict[str, list[torch.Tensor]] = field(init=False)
    pointers: dict[str, list[int]] = field(init=False)
    sizes: list[int] = field(init=False)
    param_pointers: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {name: [state[name] for state in self.states] for name in self.names}
        self.pointers = {name: addresses(map(local, tensors)) for name, tensors in self.tensors.items()}
        locals_ = self.locals()
        self.sizes = [p.numel() for p in locals_]
        self.param_pointers = addresses(locals_)

    def locals(self) -> list[torch.Tensor]:
        """This rank's parts of the parameters."""
        return [local(p) for p in self.params] if self.sharded else self.params

    def still_true(self) -> bool:
        """Return whether parameters and state are still where they were."""
        if addresses(self.locals()) != self.param_pointers:
            return False
        return all(all(map(is_, map(itemgetter(name), self.states), tensors)) for name, tensors in self.tensors.items())

    def grad_pointers(self, grads: list[torch.Tensor]) -> list[int] | None:
        """The addresses of the gradients; None when one of them is not what the cohort was made for."""
        if self.sharded:
            grads = [local(g) for g in grads]
        if not all(map(_is_contiguous, grads)) or {g.dtype for g in grads} != {self.grad_dtype}:
            return None
        return addresses(grads)


@dataclass
class CohortPlan:
    """The cohorts of one parameter group; ``where`` has each parameter's cohort, or -1 for one without a gradient."""

    params: list[torch.Tensor]
    where: list[int]
    cohorts: list[Cohort]
    absent: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.absent = [index < 0 for index in self.where]

    def grad_pointers(self, params: list[torch.Tensor], grads: list[torch.Tensor | None]) -> list[list[int]] | None:
        """The gradients' addresses for each cohort; None when the plan no longer describes the group."""
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return None
        if [g is None for g in grads] != self.absent:
            return None
        result: list[list[int]] = []
        for index, cohort in enumerate(self.cohorts):
            own = (
                grads
                if len(cohort.params) == len(grads)
                else [g for g, at in zip(grads, self.where, strict=True) if at == index]
            )
            pointers = cohort.grad_pointers(own)  # type: ignore[arg-type]
            if pointers is None or not cohort.still_true():
                return None
            result.append(pointers)
        return result
