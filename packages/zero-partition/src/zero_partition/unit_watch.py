"""An interface for tools that hear when units compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .unit import Unit


class UnitWatch(Protocol):
    """Told on this rank, on the thread that computes; calls of modules nest. Recomputing in backward is not told."""

    def enters(self, units: Sequence[Unit]) -> None:
        """A module that uses ``units`` begins its forward; their parameters are gathered."""

    def leaves(self, units: Sequence[Unit]) -> None:
        """That module's forward is over, or raised; the units are still gathered."""

    def backward_done(self, unit: Unit) -> None:
        """Autograd has finished the last of the unit's gradients in this pass, and its reduction may have begun."""


class WatchedUnits:
    """The one who is told of units, None where nobody is: `Runtime.watch_units` names one."""

    def __init__(self) -> None:
        self.watch: UnitWatch | None = None
