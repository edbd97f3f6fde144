"""The base of every schedule: learning rates as a function of the number of steps. A rate is a float, or a tensor where
a param group holds its ``lr`` as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Scheduler(Protocol):
    """A learning rate schedule: one of this package, or any of torch.optim.lr_scheduler that needs no metric."""

    def step(self) -> None:
        """Advance by one optimizer step and write the learning rates into the optimizer's param groups."""

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each param group as last written: floats, or tensors where groups hold them."""

    def state_dict(self) -> dict[str, Any]:
        """Return a snapshot of the schedule's progress for `load_state_dict`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the progress that `state_dict` returned; learning rates are written at the next `step`."""


Rate = float | torch.Tensor
"""A learning rate: a float, or a tensor of one element where the optimizer holds it as one."""


class ParamGroups(Protocol):
    """Any object with param groups: a torch optimizer, or a wrapper around one."""

    param_groups: list[dict[str, Any]]


class NotSteppedError(ValueError, AssertionError):
    """The learning rate was asked for before the schedule set one."""


class Schedule(ABC):
    """A learning rate per param group as a function of the iteration, the number of optimizer steps from 0.

    `optimizer`: the object into whose param groups the schedule writes. `last_batch_iteration`: the iteration whose
    rates were last written, -1 before the first `step`. A schedule that starts at -1 writes its starting rates at
    construction; one that starts later writes nothing until `step`. A schedule writes only `lr` (and `OneCycle` also
    `betas`) in the optimizer's param groups, so the parameters in the groups may be replaced at any time. A rate that a
    group holds as a tensor is written in place.
    """

    def __init__(self, optimizer: ParamGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = as_integer("last_batch_iteration", last_batch_iteration, least=-1)
        self._last_lr: list[Rate] | None = None

    @abstractmethod
    def get_lr(self) -> list[Rate]:
        """Return the learning rate of each param group at `last_batch_iteration`; computed, not written."""

    def get_last_lr(self) -> list[Rate]:
        """Return the learning rate of each param group as this schedule last wrote it: the schedule's own list, of
        which each `step` makes a new one.

        Raises `NotSteppedError` if it has written none yet.
        """
        if self._last_lr is None:
            raise NotSteppedError(f"{type(self).__name__} has not set a learning rate yet: need to call step() first")
        return self._last_lr

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to `batch_iteration`, and write its rates into the optimizer's param
        groups. Raises ValueError if their number has changed."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._last_lr = self._write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return `{"last_batch_iteration": int}`; all else follows from the constructor's arguments."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set `last_batch_iteration` to the one in `state_dict`; the next `step` advances from there and writes the
        rates. Raises ValueError, with nothing changed, if there is none in it."""
        iteration = state_dict.get("last_batch_iteration")
        if isinstance(iteration, bool) or not isinstance(iteration, int):
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: expected an integer 'last_batch_iteration', got {iteration!r} "
                f"(the state holds {sorted(state_dict)}); load the state of the schedule that was saved"
            )
        self.last_batch_iteration = iteration

    def _write(self, rates: Sequence[Rate]) -> list[Rate]:
        """Write one rate into each param group and return the groups' rates, which may be tensors.

        Raises ValueError if the number of groups changed.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(rates):
            raise ValueError(
                f"{type(self).__name__} was built for {len(rates)} param groups, the optimizer now has {len(groups)}: "
                "build the schedule after the last add_param_group"
            )
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(torch.as_tensor(rate).reshape(()))
            else:
                group["lr"] = rate
        return [group["lr"] for group in groups]


def per_group(optimizer: ParamGroups, name: str, value: Any) -> list[Any]:
    """Return one value per param group: ``value`` for each group, or the items of ``value`` if it is a list or tuple
    with one item per group.

    Raises ValueError, naming the argument ``name``, for a list of another length and for items that are not numbers.
    """
    count = len(optimizer.param_groups)
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name}: expected one number, or one for each of the {count} param groups, got {len(values)}")
    for each in values:
        if isinstance(each, bool) or not isinstance(each, Real | torch.Tensor):
            raise ValueError(f"{name}: expected a number or a list of numbers, got {value!r}")
    return values


def group_rates(optimizer: ParamGroups) -> list[Rate]:
    """Return the current learning rate of each param group; tensors are copied."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


def as_integer(name: str, value: Any, *, least: int) -> int:
    """Return ``value``, an int or a float without a fraction, as an int. Raises `ValueError`, naming the argument
    ``name``, for anything else and for a value below ``least``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
    return value
