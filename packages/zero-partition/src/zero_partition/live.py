"""Count how much of the model is gathered at the moment."""

from __future__ import annotations


class LiveElements:
    """Counts elements of units as they are gathered and released, so that nobody has to look through all units.

    Attributes:
        coming: elements whose gathers are in flight.
        live: elements of releasable units that are gathered, or whose gathers are in flight.
    """

    def __init__(self) -> None:
        self.coming = 0
        self.live = 0

    def made(self, numel: int) -> None:
        """There is another releasable unit, which has its values."""
        self.live += numel

    def issued(self, numel: int, *, was_released: bool) -> None:
        """The gather of a unit was issued; ``was_released``: its memory is new."""
        self.coming += numel
        self.live += numel if was_released else 0

    def arrived(self, numel: int) -> None:
        """A gather in flight has arrived, or was given up."""
        self.coming -= numel

    def released(self, numel: int) -> None:
        """A gathered unit was released."""
        self.live -= numel
