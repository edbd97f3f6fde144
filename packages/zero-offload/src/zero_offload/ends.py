"""The ends of the tiers: memory of the host, and engines that move bytes to and from files; others in a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["HostUse", "TierEnds", "current_ends", "tier_ends"]


class HostUse(NamedTuple):
    """The use of a block of host memory: ``purpose`` in words, ``parts`` its users by name, with bytes.

    ``pin``: wanted pinned. ``on_device``: not offloaded; the device is the host.
    """

    purpose: str
    pin: bool = False
    on_device: bool = False
    parts: tuple[tuple[str, int], ...] = ()


class TierEnds(Protocol):
    """Stands in for the system under the tiers."""

    def host_memory(self, nbytes: int, use: HostUse) -> torch.Tensor:
        """Return ``nbytes`` of zeroed host memory as uint8."""

    def io_engine(self, given: Any) -> Any:
        """Return the engine of a store of files in the place of the one given, which may be None."""


_ENDS: ContextVar[TierEnds | None] = ContextVar("zero_offload_ends", default=None)


def current_ends() -> TierEnds | None:
    """Return what stands in for the system in this context, or None."""
    return _ENDS.get()


@contextmanager
def tier_ends(ends: TierEnds) -> Iterator[None]:
    """Have the tiers made in this context take memory and engines from ``ends``: for a dry run, or to be counted.

    Threads that begin inside see the system.
    """
    token = _ENDS.set(ends)
    try:
        yield
    finally:
        _ENDS.reset(token)
