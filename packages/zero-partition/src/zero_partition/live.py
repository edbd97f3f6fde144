"""DeepSpeed's estimates (`estimators.py`) for a torch model, whose parameters may be on any device or on meta."""

from __future__ import annotations

import enum


class UnitState(enum.Enum):
    """Where a unit's parameters are.

    RELEASED (or GATHERED) -> GATHERING by `issue_gather`; GATHERING -> GATHERED by `wait_gather`; GATHERED -> RELEASED
    by `release`. A RELEASED unit that is kept returns to GATHERED by `restore_kept`, without a gather. Units that are
    never released stay GATHERED.
    """

    RELEASED = enum.auto()
    GATHERING = enum.auto()
    GATHERED = enum.auto()


class LiveElements:
    """Running counts of elements as units are gathered and released; they spare a loop over all units.

    Attributes:
        coming: elements whose gathers are in flight.
        live: elements of releasable units that are gathered or kept, or whose gathers are in flight.
    """

    def __init__(self) -> None:
        self.coming = 0
        self.live = 0

    def note_new_unit(self, numel: int) -> None:
        """Add a new releasable unit of ``numel`` elements to `live`: units start gathered."""
        self.live += numel

    def note_issued(self, numel: int, *, was_released: bool) -> None:
        """Add a unit of ``numel`` elements, whose gather was issued, to `coming`; also to `live` if it ``was_released``
        before."""
        self.coming += numel
        self.live += numel if was_released else 0

    def note_arrived(self, numel: int) -> None:
        """Subtract a unit of ``numel`` elements, whose gather has completed or was dropped, from `coming`."""
        self.coming -= numel

    def note_released(self, numel: int) -> None:
        """Subtract a unit of ``numel`` elements, which was released, from `live`."""
        self.live -= numel
