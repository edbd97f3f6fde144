"""Replaceable sources of the host memory and the I/O engines that the tiers use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["HostUse", "TierEnds", "current_ends", "tier_ends"]


class HostUse(NamedTuple):
    """The use of a block of host memory: ``purpose`` in words, ``parts`` the names of the tensors in it, each with
    bytes.

    ``pin``: it should be pinned. ``on_device``: it stands for device memory (not offloaded, and the device is the CPU).
    """

    purpose: str
    pin: bool = False
    on_device: bool = False
    parts: tuple[tuple[str, int], ...] = ()


class TierEnds(Protocol):
    """Provides the tiers with host memory and I/O engines in place of the system."""

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        """Return ``nbytes`` of zeroed host memory as a 1-D uint8 tensor. Called for every block that a tier allocates;
        ``use`` says what the block is for.
        """

    def io_engine(self, given: Any) -> Any:
        """Return the engine that a store of files shall use. ``given``: the engine its user asked for; None for the
        default, which may be returned too.
        """


_ENDS: ContextVar[TierEnds | None] = ContextVar("zero_offload_ends", default=None)


def current_ends() -> TierEnds | None:
    """Return the `TierEnds` that `tier_ends` has set for the running code; None outside of it, where the system
    provides.
    """
    return _ENDS.get()


@contextmanager
def tier_ends(ends: TierEnds) -> Iterator[None]:
    """Return a context manager, inside which new tiers take their memory and I/O engines from ``ends``, which may
    simulate or count them.

    Tiers made before are not affected. Threads started inside use the system.
    """
    token = _ENDS.set(ends)
    try:
        yield
    finally:
        _ENDS.reset(token)
