"""Tools run a user's script, and supervise the engines that it makes: other configurations, units and budgets, an
observer."""

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
    """Decides for `initialize` which configuration and units are used instead of those given, what the host may
    give, and who observes.

    ``world_size``: the ranks that train the same part of the model. ``processes``: those of this host.
    """

    def config(self, given: Any, world_size: int) -> Any:
        """Return the configuration to use in the place of the one given."""

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """Return the limits to cut units by in the place of those given."""

    def budget(self, processes: int) -> HostBudget:
        """Return the budget of one of ``processes`` on this host."""

    def observer(self, engine: Engine) -> Observer:
        """Return the one who is told of the steps of ``engine``."""


class Unsupervised:
    """Everything as the script says."""

    def config(self, given: Any, world_size: int) -> Any:
        """Return what was given."""
        return given

    def limits(self, limits: UnitLimits) -> UnitLimits:
        """Return what was given."""
        return limits

    def budget(self, processes: int) -> HostBudget:
        """Return one with the limits of this system."""
        return HostBudget(processes=processes)

    def observer(self, engine: Engine) -> Observer:
        """Return an observer that takes no notice."""
        return Unobserved()


_SUPERVISOR: ContextVar[Supervisor] = ContextVar("zero_core_supervisor", default=Unsupervised())  # noqa: B039


def supervisor() -> Supervisor:
    """Return the supervisor of this context."""
    return _SUPERVISOR.get()


@contextmanager
def supervised(by: Supervisor) -> Iterator[None]:
    """Have ``by`` asked for every engine that is made inside."""
    token = _SUPERVISOR.set(by)
    try:
        yield
    finally:
        _SUPERVISOR.reset(token)


def run_as_main(target: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run a script (with ``module``, a module by name) as ``__main__`` with its arguments; what it raises passes
    through."""
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
