"""The order in which units are gathered in each pass: agreed between the ranks, learned, and issued.

A pass is one forward or backward pass of the model. To issue a gather is to start its collective, without waiting for
the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import cast

from .host_facts import storage_address
from .live import UnitState
from .messages import StepNumber
from .unit import Unit


def merge_orders(observed: Iterable[Sequence[int]]) -> list[int]:
    """Merge the orders (unit numbers) that the ranks observed, given in rank order, into one; every rank computes the
    same result.

    The first order is kept. A unit that only later orders have is inserted after the unit that precedes it in its own
    order, or at the front. Repeats of a unit are ignored.
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
    """The order in which one pass gathers units, each at most once, and how far this rank has got in it.

    Attributes:
        order: the units, by index.
        issued: number of gathers that this rank has issued in the running pass.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self._index = {unit: i for i, unit in enumerate(self.order)}
        self.issued = 0

    def restart(self) -> None:
        """Begin a new pass in the same order, in which no gather is issued yet."""
        self.issued = 0

    def position(self, unit: int) -> int:
        """Return the position of unit index ``unit`` in the order; -1 if the pass does not gather it."""
        return self._index.get(unit, -1)

    def pending_until(self, unit: int) -> list[int] | None:
        """Return the indices of the units whose gathers have yet to be issued, in order, up to and with ``unit``; None
        if the pass does not gather ``unit`` or has issued it already."""
        index = self._index.get(unit)
        if index is None or index < self.issued:
            return None
        return self.order[self.issued : index + 1]

    def ahead(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` units whose gathers are not issued yet, in order; fewer at the end
        of the order."""
        return self.order[self.issued : self.issued + count]

    def advance(self, count: int) -> None:
        """Count the next ``count`` gathers of the order as issued."""
        self.issued += count


class OrderedGathers:
    """The gathers of one engine, issued in the order that the ranks have agreed for each pass.

    Issuing a gather never waits for another rank. A pass is known by a key, its name ("backward", or "forward of" a
    module), under which its order is learned: the ranks exchange in which order each has used units, and merge that.
    ``units``: all units; a unit's index is its position in it. ``step``: the step number that tags the gathers.
    """

    def __init__(self, units: Sequence[Unit], step: StepNumber) -> None:
        self._units = units
        self._step = step
        self._releasable = [u.index for u in units if u.releasable]
        self._schedules: dict[str, GatherSchedule] = {}
        self._learned: set[str] = set()
        self._key = ""
        self._schedule: GatherSchedule | None = None
        self._used: dict[int, None] = {}
        self._fresh: set[int] = set()
        self._observed: dict[str, list[int]] = {}
        self._outside: list[Unit] = []
        self._by_address: dict[int, Unit] = {}
        self._kept: Unit | None = None
        self._restores = False

    @property
    def active(self) -> bool:
        """True while a pass is running."""
        return self._schedule is not None

    @property
    def key(self) -> str:
        """The key of the running pass, or of the last one; empty before the first."""
        return self._key

    @property
    def order(self) -> Sequence[int]:
        """The unit indices of the running pass, or of the last one, in the order of their gathers; empty before the
        first pass."""
        schedule = self._schedule if self._schedule is not None else self._schedules.get(self._key)
        return () if schedule is None else schedule.order

    @property
    def used(self) -> Collection[int]:
        """The indices of the units that this rank used in the running or last pass, in order of first use."""
        return self._used.keys()

    @property
    def issued(self) -> int:
        """Number of gathers of the running pass's order that this rank has issued; 0 outside a pass."""
        return 0 if self._schedule is None else self._schedule.issued

    @property
    def left(self) -> int:
        """Number of gathers of the running pass's order that are not issued yet; 0 outside a pass."""
        return 0 if self._schedule is None else len(self._schedule.order) - self._schedule.issued

    def ahead(self, count: int) -> Sequence[int]:
        """Return the indices of the next ``count`` units whose gathers the running pass has not issued yet, in order;
        fewer at its end, none outside a pass."""
        return () if self._schedule is None else self._schedule.ahead(count)

    def position(self, unit: Unit) -> int:
        """Return the position of ``unit`` in the running pass's order; -1 if the pass does not gather it, or
        none runs."""
        return self._schedule.position(unit.index) if self._schedule is not None else -1

    def note_use(self, unit: Unit) -> None:
        """Record that this rank uses ``unit`` in the running pass; do nothing outside a pass."""
        if self._schedule is not None:
            self._used[unit.index] = None

    def is_present(self, unit: Unit) -> bool:
        """Return whether ``unit`` is gathered now, and its gather was issued (or adopted) in the running, or else the
        last, pass."""
        return unit.index in self._fresh and unit.state is UnitState.GATHERED

    def is_used(self, unit: Unit) -> bool:
        """Return whether this rank has used ``unit`` in the running pass, or else the last one, and
        `is_present` holds."""
        return unit.index in self._used and self.is_present(unit)

    def is_issued(self, unit: Unit) -> bool:
        """Return whether the gather of ``unit`` was issued in the running (or last) pass and the unit was not released
        since; it may be in flight."""
        return unit.index in self._fresh and unit.state is not UnitState.RELEASED

    @property
    def kept(self) -> int:
        """Index of the unit that `keep` has released with its memory kept; -1 if there is none, or if that memory is no
        longer kept."""
        return self._kept.index if self._kept is not None and self._kept.kept else -1

    def keep(self, unit: Unit) -> None:
        """Release ``unit`` but keep the memory of its flat buffer, so that the next pass can restore it without a
        gather (see `Unit.release`)."""
        unit.release(keep=True)
        self._kept = unit

    def first_of(self, key: str, *, after: str) -> int:
        """Return the index of the unit that a pass with key ``key`` gathers first; -1 if it gathers none.

        Before that pass has an order, return the last unit of the pass with key ``after``, which must have one.
        """
        order = self._schedules[key].order if key in self._schedules else self._schedules[after].order[::-1]
        return order[0] if order else -1

    def begin(
        self,
        key: str,
        *,
        like_reversed: str | None = None,
        order: Sequence[int] | None = None,
        restores: bool = False,
    ) -> None:
        """Start the pass with key ``key`` in its learned order; issue nothing yet. The first time, the order is the
        reverse of that of the pass with key ``like_reversed`` if that one is learned, else module order.

        ``order``: unit indices, the same on every rank, that replace the learned order. ``restores``: every rank has
        released the same unit by `keep`, and this pass restores it without a gather. Otherwise memory that this rank
        has kept is freed.
        """
        self._restores = restores
        if self._kept is not None and not restores:
            self._kept.drop_kept()
            self._kept = None
        if order is not None:
            self._schedules[key] = GatherSchedule(order)
            self._learned.add(key)
        elif key not in self._schedules:
            first = self._releasable
            if like_reversed is not None and like_reversed in self._learned:
                first = self._schedules[like_reversed].order[::-1]
            self._schedules[key] = GatherSchedule(first)
        self._key = key
        self._schedule = self._schedules[key]
        self._schedule.restart()
        self._used = {}
        self._fresh.clear()

    def adopt(self, unit: Unit) -> None:
        """Count ``unit``, which is still gathered from an earlier pass, as gathered in the running pass."""
        self._fresh.add(unit.index)

    def issue_next(self) -> Unit:
        """Issue the next gather of the running pass and return its unit. There must be one (`left` > 0)."""
        schedule = cast(GatherSchedule, self._schedule)
        unit = self._units[schedule.order[schedule.issued]]
        schedule.advance(1)
        self._issue(unit)
        self._fresh.add(unit.index)
        return unit

    def issue_until(self, count: int) -> None:
        """Issue gathers until at least the first ``count`` of the running pass's order, or all of it, are issued;
        do nothing outside a pass."""
        while self._schedule is not None and self._schedule.issued < min(count, len(self._schedule.order)):
            self.issue_next()

    def issue_through(self, unit: Unit) -> bool:
        """Issue the gathers of the running pass's order up to that of ``unit``.

        Return False, and issue nothing, if the pass has issued that gather before, does not gather the unit, or no pass
        runs.
        """
        ahead = self._schedule.pending_until(unit.index) if self._schedule is not None else None
        if ahead is None:
            return False
        self.issue_until(self.issued + len(ahead))
        return True

    def serve_request(self, index: int, mine: bool) -> None:
        """Issue the gather of the unit with index ``index``, which some rank has requested outside the pass's order,
        after all gathers of that order. Collective: every rank calls it at the same point.

        ``mine``: this rank has requested it too, and waits for it itself; otherwise a unit that was released here is
        released again.
        """
        self.issue_until(len(self.order))  # the group's order is the same on all ranks
        unit = self._units[index]
        absent = unit.state is UnitState.RELEASED
        self._issue(unit)
        if mine:
            self._fresh.add(index)
        elif absent:
            unit.release()

    def unit_of_storage(self, address: int) -> Unit | None:
        """Return the unit whose flat buffer has the storage at ``address`` (`host_facts.storage_address`); None if
        there is none.

        Finds only units whose gather was issued here and that were not released since; the gather may be in flight.
        """
        unit = self._by_address.get(address)
        return unit if unit is not None and unit.holds_storage(address) else None

    def note_outside(self, unit: Unit) -> None:
        """Remember ``unit``, which was gathered outside passes, for the next `release_outside`, which the ranks call at
        their next agreement outside passes."""
        self._outside.append(unit)

    def release_outside(self) -> None:
        """Release the units that `note_outside` remembered since the last call, except those that the user keeps
        gathered (pinned). Memory that autograd has saved stays with its graphs."""
        outside, self._outside = self._outside, []
        for unit in outside:
            if not unit.pinned:
                unit.release()

    def close(self, *, observed: bool) -> None:
        """End the running pass. If its order is not learned yet, or lacks a unit that this rank used, keep the units
        used for `take_observed`.

        ``observed``: False if this rank only issued gathers for others, so that nothing is to be learned from it.
        """
        order = set(self.order)
        if observed and (self._key not in self._learned or not order.issuperset(self._used)):
            self._observed[self._key] = list(self._used)
        self._schedule = None

    def abandon(self) -> None:
        """End the running pass, which has failed; nothing is learned from it. Gathers in flight are not cancelled."""
        self._schedule = None
        self._used = {}
        self._fresh.clear()

    def reset(self) -> None:
        """Forget the running pass, all learned orders and the units remembered by `note_outside`, as after a failure
        the ranks may have learned different orders."""
        self.abandon()
        self._schedules.clear()
        self._learned.clear()
        self._observed.clear()
        self._outside.clear()

    def take_observed(self) -> dict[str, list[int]]:
        """Return, by key of a pass, the indices of the units that this rank used, in order of first use, in the passes
        that `close` has kept since the last call; forget them."""
        observed, self._observed = self._observed, {}
        return observed

    def learn(self, observed_by_rank: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Merge what the ranks have observed into the learned orders; the result is the same on every rank.

        ``observed_by_rank``: what `take_observed` returned on each rank, in rank order; equal observations may be given
        once.
        """
        for key in dict.fromkeys(k for observed in observed_by_rank for k in observed):
            base = [self._schedules[key].order] if key in self._learned else []
            order = merge_orders([*base, *(observed[key] for observed in observed_by_rank if key in observed)])
            self._schedules[key] = GatherSchedule(order)
            self._learned.add(key)

    def _issue(self, unit: Unit) -> None:
        """Issue the gather of ``unit``, or restore its kept memory where this pass may, and remember its storage's
        address for `unit_of_storage`."""
        if self._restores and unit.index == self.kept:
            unit.restore_kept()
        else:
            unit.issue_gather(self._step.value)
        self._by_address[unit.flat.untyped_storage().data_ptr() or storage_address(unit.flat)] = unit
