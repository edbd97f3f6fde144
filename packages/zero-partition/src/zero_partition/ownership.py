"""Remember the engine that a parameter belongs to."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import nn

_OWNER = "_zero_partition"  # the one attribute that a parameter of an engine carries
_RECORD = "_zero_sharded"  # the one attribute that a parameter carries, from Init until a unit owns it
GradientAccess = Literal["read", "cancelled", "written"]
"""What is done to a parameter's ``grad``; cancelled: it is set to None."""
_OWNER_OF = operator.attrgetter(_OWNER)


class Owner(Protocol):
    """The questions that the parameters of a `Partition` ask of it."""

    def add_use(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather ``parameter`` whenever ``module`` runs."""

    def gradient_accessed(self, parameter: nn.Parameter, access: GradientAccess, /) -> None:
        """Take note of what is done to ``parameter.grad``."""

    def lend_data(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """Return what user code gets for ``parameter.data``: an alias of ``data``, of which writes are found."""

    def values_used(self, parameter: nn.Parameter, call: str, *, writes: bool) -> None:
        """Gather a released parameter that ``call`` reads or writes, or raise by name."""

    def gathers_for_copies(self, parameter: nn.Parameter) -> bool:
        """Return True when a copy of ``parameter`` made now has to be preceded by `unsharded`, on every rank."""

    def unsharded(self, parameter: nn.Parameter) -> AbstractContextManager[None]:
        """A context in which ``parameter`` is gathered. Collective."""


class InitRecord(Protocol):
    """The answers for a parameter that an `Init` has sharded, and that no engine owns yet."""

    @property
    def name(self) -> str:
        """The parameter's name, for messages."""

    def forget(self) -> None:
        """An engine owns the parameter from now on."""

    def twin(self, kind: type[nn.Parameter]) -> nn.Parameter:
        """A parameter of the class ``kind``, released, with a shard that is a copy of this one's."""


class _Reference:
    """Says which partition a parameter belongs to; copies and pickles of the parameter belong to none."""

    def __init__(self, owner: Owner) -> None:
        self.owner = weakref.ref(owner)

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def find_owner(parameter: object) -> Owner | None:
    """The owner of a parameter, if it has one."""
    reference = getattr(parameter, _OWNER, None) if isinstance(parameter, nn.Parameter) else None
    return None if reference is None else reference.owner()


def all_owned(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether every parameter carries an owner, which may be gone."""
    try:
        deque(map(_OWNER_OF, parameters), maxlen=0)
    except AttributeError:
        return False
    return True


def without_owner(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the user's attributes of ``parameter``."""
    return {name: value for name, value in parameter.__dict__.items() if name != _OWNER}


def init_record(parameter: object) -> Any:
    """The `InitRecord` of a parameter that an `Init` has sharded and no engine owns yet, else None."""
    return getattr(parameter, _RECORD, None) if isinstance(parameter, nn.Parameter) else None


def note_record(parameter: nn.Parameter, record: InitRecord) -> None:
    """Note that ``record`` answers for ``parameter``."""
    setattr(parameter, _RECORD, record)


def forget_record(parameter: nn.Parameter) -> None:
    """A unit owns the parameter from now on."""
    init_record(parameter).forget()
    delattr(parameter, _RECORD)


def own(parameter: nn.Parameter, owner: Owner) -> None:
    """Note that ``parameter`` belongs to ``owner`` now."""
    setattr(parameter, _OWNER, _Reference(owner))


def disown(parameter: nn.Parameter) -> None:
    """Note that ``parameter`` belongs to no partition any more."""
    parameter.__dict__.pop(_OWNER, None)
