"""Let a tool run a user's script and replace configurations, units, budgets and observers of the script's engines."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
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
        """Return the memory budget of this process, one of ``processes`` on this host."""

    def observer(self, engine: Engine) -> Observer:
        """Return the observer of the losses and steps of ``engine``."""


class Unsupervised:
    """A `Supervisor` that changes nothing."""

    def config(self, given: Any, world_size: int) -> Any:
        """Return ``given``."""
        return given

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """Return ``limits``."""
        return limits

    def budget(self, processes: int) -> HostBudget:
        """Return a budget with the limits of this system."""
        return HostBudget(processes=processes)

    def observer(self, engine: Engine) -> Observer:
        """Return the observer that does nothing."""
        return Unobserved()


_SUPERVISOR: ContextVar[Supervisor] = ContextVar("zero_core_supervisor", default=Unsupervised())  # noqa: B039


def supervisor() -> Supervisor:
    """Return the supervisor of this context (`supervised`), by default an `Unsupervised`."""
    return _SUPERVISOR.get()


@contextmanager
def supervised(by: Supervisor) -> Iterator[None]:
    """Have ``by`` supervise every engine that is made inside the block, in this thread or task."""
    token = _SUPERVISOR.set(by)
    try:
        yield
    finally:
        _SUPERVISOR.reset(token)


def run_as_main(target: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run the script at the path ``target`` (with ``module``: the module of that name) as ``__main__``, with
    ``arguments`` as its command line; restore ``sys.argv`` and ``sys.path`` after it. Its exceptions propagate."""
    before, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, path
