"""Attributes by which a parameter refers to its owner, the `Partition` that it belongs to, or to the `Init` that has
sharded it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import nn

_OWNER = "_zero_partition"  # the one attribute that a parameter of an engine carries
_RECORD = "_zero_sharded"  # the one attribute that a parameter carries, from Init until a unit owns it
GradientAccess = Literal["read", "cancelled", "written"]
"""How user code accesses a parameter's ``grad``; "cancelled": it sets it to None."""
_OWNER_OF = operator.attrgetter(_OWNER)


class Owner(Protocol):
    """The interface through which the classes that the engine gives to parameters call the parameters' `Partition`."""

    def add_use(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather ``parameter`` whenever ``module`` runs from now on; do nothing if either does not belong to the
        owner's model."""

    def gradient_accessed(self, parameter: nn.Parameter, access: GradientAccess, /) -> None:
        """Record that user code is about to access ``parameter.grad``, or raise `PartitionError` to refuse the
        access."""

    def lend_data(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``data`` for user code that reads ``parameter.data``; the owner finds writes
        through it."""

    def values_used(self, parameter: nn.Parameter, call: str, *, writes: bool) -> None:
        """Gather ``parameter`` if it is released, as the torch function named ``call`` is about to use its values.
        ``writes``: the function writes them. Raises `PartitionError` or `ReleasedParameterError`, naming the parameter,
        to refuse the use."""

    def gathers_for_copies(self, parameter: nn.Parameter) -> bool:
        """Return whether code that copies ``parameter`` now has to open `unsharded` first, on every rank, as it may be
        released."""

    def unsharded(self, parameter: nn.Parameter) -> AbstractContextManager[None]:
        """Return a context in which ``parameter`` is gathered, outside passes. Collective."""


class InitRecord(Protocol):
    """The record of a parameter that an `Init` has sharded and no engine owns yet."""

    @property
    def name(self) -> str:
        """The parameter's name, for error messages."""

    def forget(self) -> None:
        """Drop the reference to the parameter, which an engine owns from now on."""

    def released_copy(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """Return a new released parameter of class ``kind`` with a record of its own, whose shard is a copy of this
        one's."""


class _Reference:
    """A weak reference from a parameter to its owner. Copying or pickling it gives None, as a copied parameter has no
    owner."""

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        """Return None, as a copied parameter has no owner."""
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return what pickle writes: None, as an unpickled parameter has no owner."""
        return type(None), ()


def find_owner(parameter: object) -> Owner | None:
    """Return the owner of ``parameter``; None if it has none, if the owner is gone, or for any other object."""
    reference = getattr(parameter, _OWNER, None) if isinstance(parameter, nn.Parameter) else None
    return None if reference is None else reference.owner()


def owner_references(parameters: Sequence[nn.Parameter]) -> list[object]:
    """Return the attribute of each parameter that refers to its owner; None for a parameter without one.

    No two parameters share such an object, and it moves along where the values and attributes of two parameters are
    swapped, so comparing the list with an earlier one finds swaps.
    """
    try:
        return list(map(_OWNER_OF, parameters))
    except AttributeError:
        return [getattr(parameter, _OWNER, None) for parameter in parameters]


def without_owner(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes of ``parameter`` (its ``__dict__``) without the reference to its owner, as a new dict."""
    return {name: value for name, value in parameter.__dict__.items() if name != _OWNER}


def init_record(parameter: object) -> Any:
    """Return the `InitRecord` of a parameter that an `Init` has sharded and no engine owns yet; None for anything
    else."""
    return getattr(parameter, _RECORD, None) if isinstance(parameter, nn.Parameter) else None


def attach_record(parameter: nn.Parameter, record: InitRecord) -> None:
    """Attach ``record`` to ``parameter``, where `init_record` finds it."""
    setattr(parameter, _RECORD, record)


def detach_record(parameter: nn.Parameter) -> None:
    """Detach the parameter's `InitRecord`, as a unit owns the parameter from now on; it must have one."""
    init_record(parameter).forget()
    delattr(parameter, _RECORD)


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Make ``owner`` the owner of ``parameter``, in place of an earlier one; the reference is weak."""
    setattr(parameter, _OWNER, _Reference(owner))


def disown(parameter: nn.Parameter) -> None:
    """Remove the reference from ``parameter`` to its owner; do nothing if it has none."""
    parameter.__dict__.pop(_OWNER, None)
