"""An interface for tools that are called when units compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .unit import Unit


class UnitWatch(Protocol):
    """A tool that is called when units compute: on this rank, on the thread that computes.

    Calls for modules nest, as the modules do. Forwards that backward recomputes are left out.
    """

    def enters(self, units: Sequence[Unit]) -> None:
        """Take note that a module that uses ``units`` begins its forward; called after their parameters were
        gathered."""

    def leaves(self, units: Sequence[Unit]) -> None:
        """Take note that this module's forward has returned or raised; called before the ``units`` are released."""

    def backward_done(self, unit: Unit) -> None:
        """Take note that autograd has finished the last of the unit's gradients in this pass; its reduction may have
        started."""


class WatchedUnits:
    """Holds the `UnitWatch` that is called, None without one; `Runtime.watch_units` sets it."""

    def __init__(self) -> None:
        self.watch: UnitWatch | None = None
