"""Let a tool replace configurations, units, budgets and observers of the engines that a user's script makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from zero_offload import HostBudget
from zero_partition import UnitLimits

from .engine import Engine
from .training import Observer, Unobserved


class Supervisor(Protocol):
    """Called by `initialize` to replace the configuration, unit limits, memory budget and observer of an engine. Call
    order per engine: `config` (also by `Init`), `limits`, `budget` (any number of times), `observer`."""

    def config(self, given: Any, world_size: int) -> Any:
        """Return the configuration to use instead of ``given``; ``world_size``: the data-parallel ranks."""

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """Return the limits on the size of units to use instead of ``limits``."""

    def budget(self, processes: int) -> HostBudget:
        """Return a new memory budget for this process, one of ``processes`` of the job on this host."""

    def observer(self, engine: Engine) -> Observer:
        """Return the observer that is to get the losses and steps of ``engine``."""


class Unsupervised:
    """A `Supervisor` that changes nothing."""

    def config(self, given: Any, world_size: int) -> Any:
        """Return ``given``."""
        return given

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """Return ``limits``."""
        return limits

    def budget(self, processes: int) -> HostBudget:
        """Return a new memory budget with the limits of this system."""
        return HostBudget(processes=processes)

    def observer(self, engine: Engine) -> Observer:
        """Return the observer that does nothing."""
        return Unobserved()


_SUPERVISOR: ContextVar[Supervisor] = ContextVar("zero_core_supervisor", default=Unsupervised())  # noqa: B039


def supervisor() -> Supervisor:
    """Return the supervisor that `supervised` has set for this thread or task; by default an `Unsupervised`."""
    return _SUPERVISOR.get()


@contextmanager
def supervised(by: Supervisor) -> Iterator[None]:
    """Let ``by`` supervise every engine that is made inside the block, in this thread or task."""
    token = _SUPERVISOR.set(by)
    try:
        yield
    finally:
        _SUPERVISOR.reset(token)
