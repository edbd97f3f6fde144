"""The agreed order of a pass's gathers: pure arithmetic over unit numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merge_orders(observed: Iterable[Sequence[int]]) -> list[int]:
    """Merge the orders (unit numbers) that the ranks observed, given in rank order, into one; every rank computes the
    same result.

    The first order is kept; a unit that only later ones have is inserted behind its predecessor there, or at the front.
    Repeats of a unit are ignored.
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
    """The order in which one pass gathers units, each at most once.

    Attributes:
        order: the units, by index.
        issued: number of gathers that this rank has issued in the running pass.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._index = {unit: i for i, unit in enumerate(self.order)}
        self.issued = 0

    def restart(self) -> None:
        """Begin a new pass, in which no gather is issued yet."""
        self.issued = 0

    def position(self, unit: int) -> int:
        """Return the index of ``unit`` in the order; -1 if the pass does not gather it."""
        return self._index.get(unit, -1)

    def pending_until(self, unit: int) -> list[int] | None:
        """Return the indices of the units whose gathers have to be issued, in order, up to that of ``unit``; None if
        the pass does not gather it or has issued it already."""
        index = self._index.get(unit)
        if index is None or index < self.issued:
            return None
        return self.order[self.issued : index + 1]

    def remaining(self) -> list[int]:
        """Return the indices of the units whose gathers are not issued yet, in order."""
        return self.order[self.issued :]

    def advance(self, count: int) -> None:
        """Count the next ``count`` gathers of the order as issued."""
        self.issued += count
