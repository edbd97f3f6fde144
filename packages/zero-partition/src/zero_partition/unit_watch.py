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
        """Called when a module that uses ``units`` begins its forward, after their parameters were gathered."""

    def leaves(self, units: Sequence[Unit]) -> None:
        """Called when the forward of a module that uses ``units`` has returned or raised, before they are released."""

    def backward_done(self, unit: Unit) -> None:
        """Called when autograd has finished the last gradient of ``unit`` in this pass; the unit's reduction may have
        started."""


class WatchedUnits:
    """Holds the `UnitWatch` that is called, ``watch``, None for none; `Runtime.watch_units` sets it."""

    def __init__(self) -> None:
        self.watch: UnitWatch | None = None
