"""Which engine a parameter belongs to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .partition import Partition

_OWNER = "_zero_partition"  # the one attribute that a parameter of an engine carries


class _Owner:
    """Says which partition a parameter belongs to; copies and pickles of the parameter belong to none."""

    def __init__(self, partition: Partition) -> None:
        self.partition = weakref.ref(partition)

    def __deepcopy__(self, _memo: dict[int, object]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def owner_of(parameter: object) -> Partition | None:
    """The partition that a parameter belongs to, if any."""
    owner = getattr(parameter, _OWNER, None) if isinstance(parameter, nn.Parameter) else None
    return None if owner is None else owner.partition()


def own(parameter: nn.Parameter, partition: Partition) -> None:
    """Note that ``parameter`` belongs to ``partition`` now."""
    setattr(parameter, _OWNER, _Owner(partition))


def disown(parameter: nn.Parameter) -> None:
    """Note that ``parameter`` belongs to no partition any more."""
    delattr(parameter, _OWNER)
