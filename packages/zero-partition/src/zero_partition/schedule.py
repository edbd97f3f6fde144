"""The agreed orders of gathers and reductions: pure arithmetic over unit numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merge_orders(observed: Iterable[Sequence[int]]) -> list[int]:
    """One order out of what each rank observed (rank order); every rank computes the same result.

    Rank 0's order is kept; a unit that only later ranks used is put behind the unit that preceded it there. Repeats
    count once.
    """
    merged: list[int] = []
    for order in observed:
        place = -1
        for unit in dict.fromkeys(order):
            if unit in merged:
                place = merged.index(unit)
            else:
                place += 1
                merged.insert(place, unit)
    return merged


class GatherSchedule:
    """The order in which one pass gathers units, each at most once, and how far this rank has issued it."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._index = {unit: i for i, unit in enumerate(self.order)}
        self.issued = 0

    def restart(self) -> None:
        """Begin a new pass."""
        self.issued = 0

    def position(self, unit: int) -> int:
        """Place of a unit in the order; -1 when it is not in it."""
        return self._index.get(unit, -1)

    def pending_until(self, unit: int) -> list[int] | None:
        """Units to issue, in order, so that ``unit`` is among the issued; None when the pass cannot issue it (any
        more)."""
        index = self._index.get(unit)
        if index is None or index < self.issued:
            return None
        return self.order[self.issued : index + 1]

    def remaining(self) -> list[int]:
        """Units not yet issued in this pass, in order."""
        return self.order[self.issued :]

    def advance(self, count: int) -> None:
        """Note that ``count`` more units have been issued."""
        self.issued += count
