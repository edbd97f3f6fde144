"""Gathering and releasing units: the agreed order of gathers, prefetching, and when a unit is released."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, cast

from .dispatch_modes import outside_transforms
from .host_facts import storage_address
from .live import LiveElements, UnitState
from .messages import StepNumber
from .residency import Residency
from .schedule import GatherSchedule, merge_orders
from .unit import Unit

_PREFETCHED_SHARDS = 8  # units whose shards a slow tier is asked for before they are gathered


class OrderedGathers:
    """The gathers of one engine, issued in the order that the ranks have agreed for each pass.

    Issuing a gather never waits for another rank. A pass is known by a key, its name ("backward", or "forward of" a
    module), under which its order is learned. ``units``: all units; a unit's index is its position in it. ``step``:
    number for the tags of the gathers.
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

    @property
    def active(self) -> bool:
        """Return whether a pass is running."""
        return self._schedule is not None

    @property
    def key(self) -> str:
        """Return the key of the running pass, or of the last one; empty before the first."""
        return self._key

    @property
    def order(self) -> Sequence[int]:
        """Return the unit indices of the running pass, or of the last one, in the order of their gathers; empty before
        the first pass."""
        schedule = self._schedule if self._schedule is not None else self._schedules.get(self._key)
        return () if schedule is None else schedule.order

    @property
    def used(self) -> Collection[int]:
        """Return the indices of the units that this rank used in the running or last pass, in order of first use."""
        return self._used.keys()

    @property
    def issued(self) -> int:
        """Return how many gathers of the running pass's order this rank has issued; 0 outside a pass."""
        return 0 if self._schedule is None else self._schedule.issued

    @property
    def remaining(self) -> Sequence[int]:
        """Return the indices of the units whose gathers the running pass has not issued yet, in order; empty outside a
        pass."""
        return () if self._schedule is None else self._schedule.remaining()

    def position(self, unit: Unit) -> int:
        """Return the index of ``unit`` in the running pass's order; -1 if the pass does not gather it, or none runs."""
        return self._schedule.position(unit.index) if self._schedule is not None else -1

    def note_use(self, unit: Unit) -> None:
        """Record that this rank uses ``unit`` in the running pass; do nothing outside a pass."""
        if self._schedule is not None:
            self._used[unit.index] = None

    def is_present(self, unit: Unit) -> bool:
        """Return whether ``unit`` is gathered now, by a gather that was issued in the running (or last) pass."""
        return unit.index in self._fresh and unit.state is UnitState.GATHERED

    def is_used(self, unit: Unit) -> bool:
        """Return whether this rank has used ``unit`` in the running pass and `is_present` holds."""
        return unit.index in self._used and self.is_present(unit)

    def is_issued(self, unit: Unit) -> bool:
        """Return whether the gather of ``unit`` was issued in the running (or last) pass, and the unit was not released
        since."""
        return unit.index in self._fresh and unit.state is not UnitState.RELEASED

    def begin(self, key: str, *, like_reversed: str | None = None) -> None:
        """Start the pass of this ``key`` in its learned order; issue nothing yet. The first time, the order is the
        reverse of that of the pass ``like_reversed`` (a key) if that one is learned, else module order."""
        if key not in self._schedules:
            order = self._releasable
            if like_reversed is not None and like_reversed in self._learned:
                order = self._schedules[like_reversed].order[::-1]
            self._schedules[key] = GatherSchedule(order)
        self._key = key
        self._schedule = self._schedules[key]
        self._schedule.restart()
        self._used = {}
        self._fresh.clear()

    def issue_next(self) -> Unit:
        """Issue the next gather of the running pass and return its unit. Call it only if some are `remaining`."""
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
        """Gather unit ``index``, which some rank has requested, after the rest of the pass's order. ``mine``: this rank
        has requested it too, and waits for it itself; else the unit is released again if it was released before.
        Collective: every rank calls it at the same point."""
        self.issue_until(len(self.order))  # the group's order is the same on all ranks
        unit = self._units[index]
        absent = unit.state is UnitState.RELEASED
        self._issue(unit)
        if mine:
            self._fresh.add(index)
        elif absent:
            unit.release()

    def unit_of_storage(self, address: int) -> Unit | None:
        """Return the gathered unit whose flat buffer has the storage at ``address``; None if there is none."""
        unit = self._by_address.get(address)
        return unit if unit is not None and unit.holds_storage(address) else None

    def note_outside(self, unit: Unit) -> None:
        """Have the next `release_outside`, at the next agreement point outside passes, release ``unit``, which was
        gathered outside passes."""
        self._outside.append(unit)

    def release_outside(self) -> None:
        """Release the units given to `note_outside` since the last call unless they are pinned; autograd graphs keep
        memory they saved."""
        outside, self._outside = self._outside, []
        for unit in outside:
            if not unit.pinned:
                unit.release()

    def close(self, *, observed: bool) -> None:
        """End the running pass, and keep the units that it used for `take_observed` if its order lacks one of them or
        is not learned yet.

        ``observed``: False if this rank only issued gathers for others, so that the units it used say nothing.
        """
        order = set(self.order)
        if observed and (self._key not in self._learned or not order.issuperset(self._used)):
            self._observed[self._key] = list(self._used)
        self._schedule = None

    def abandon(self) -> None:
        """End the running pass, which has failed; nothing is learned from it."""
        self._schedule = None
        self._used = {}
        self._fresh.clear()

    def reset(self) -> None:
        """Forget the running pass, all learned orders, and units waiting for `release_outside`: ranks may have learned
        different orders."""
        self.abandon()
        self._schedules.clear()
        self._learned.clear()
        self._observed.clear()
        self._outside.clear()

    def take_observed(self) -> dict[str, list[int]]:
        """Return and forget this rank's observations since the last call: by key of a pass, the indices of the units in
        order of first use."""
        observed, self._observed = self._observed, {}
        return observed

    def learn(self, observed_by_rank: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Merge what the ranks have observed into the learned orders; same result on every rank.

        ``observed_by_rank``: each rank's `take_observed`, in rank order; of ranks that observed the same the first is
        enough.
        """
        for key in dict.fromkeys(k for observed in observed_by_rank for k in observed):
            base = [self._schedules[key].order] if key in self._learned else []
            order = merge_orders([*base, *(observed[key] for observed in observed_by_rank if key in observed)])
            self._schedules[key] = GatherSchedule(order)
            self._learned.add(key)

    def _issue(self, unit: Unit) -> None:
        """Issue the gather of ``unit``, and remember its storage's address for `unit_of_storage`."""
        unit.issue_gather(self._step.value)
        self._by_address[unit.flat.untyped_storage().data_ptr() or storage_address(unit.flat)] = unit


class GatherWaits(Protocol):
    """What a rank must start before it blocks on a gather, so that no other rank waits for it in turn; see
    [Note: waits] in interleaving.py."""

    def before_gather(self, unit: Unit, /) -> None:
        """Start every reduction that another rank may finish before it issues the gather of ``unit``.

        Called before this rank blocks on that gather, which it has issued.
        """

    def before_unscheduled_gather(self) -> None:
        """Start every remaining reduction of the pass.

        Called before this rank blocks on a gather outside the pass's order, which every rank must join: the others
        join only once they have finished the pass or request a gather themselves.
        """


class Gatherer:
    """Gathers releasable units when modules need them, prefetches the next ones, and releases them.

    ``units``: all units, by index. ``gathers``: issues their gathers. ``waits``: called before this rank blocks on a
    gather. ``request``: gathers a unit (by index) that the pass's order cannot give, together with all ranks (see
    agreement.py). ``residency``: is told which shards will be needed soon. ``live``: counts the units' elements.
    ``prefetch_numel`` bounds the elements in flight ahead of use, ``max_live_numel`` the gathered ones; the unit that
    is needed now is gathered whatever the bounds, and so is the one after it unless ``prefetch_numel`` is 0: otherwise
    a unit larger than a bound would never overlap with computation.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: OrderedGathers,
        waits: GatherWaits,
        request: Callable[[int], None],
        residency: Residency,
        live: LiveElements,
        *,
        prefetch_numel: int,
        max_live_numel: int,
    ) -> None:
        self._units = units
        self._gathers = gathers
        self._waits = waits
        self._request = request
        self._residency = residency
        self._live = live
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._kept: dict[str, set[int]] = {}

    def begin(self, key: str, *, like_reversed: str | None = None) -> None:
        """Start the pass of this ``key`` (see `OrderedGathers.begin`), and have the tier load the shards that it
        gathers first."""
        self._gathers.begin(key, like_reversed=like_reversed)
        self._prefetch_shards(self._gathers.remaining)

    def gather(self, unit: Unit) -> None:
        """Gather ``unit``, wait until its parameters are full, and prefetch the next units of the pass.

        Does nothing for a unit that is never released; only notes the use of one that is gathered in this pass already.
        Outside a pass, or where the pass's order cannot give the unit, all ranks have to join (see [Note: requests] in
        agreement.py).
        """
        if not unit.releasable:
            return
        self._gathers.note_use(unit)
        if self._gathers.is_present(unit):
            return
        self._gather_absent(unit)

    def release(self, unit: Unit) -> None:
        """Release ``unit``, whose modules have run in this pass, if it is releasable. A pinned unit stays; so does,
        until the end of the pass, one that had to be requested in a pass of this key, as the order lacked it."""
        if unit.releasable and unit.index not in self._kept.get(self._gathers.key, ()):
            self._release(unit)

    def release_before(self, unit: Unit, may_release: Callable[[Unit], bool]) -> None:
        """Release the gathered units that stand at least two places before ``unit`` in the pass's order, as `release`
        does; only those for which ``may_release`` returns True."""
        for index in self._gathers.order[: max(0, self._gathers.position(unit) - 1)]:
            if self._units[index].state is UnitState.GATHERED and may_release(self._units[index]):
                self.release(self._units[index])

    def end(self, *, joined: bool = False) -> None:
        """End the pass: issue the gathers that this rank did not need, wait for those in flight, and release every unit
        that is not pinned; do nothing outside a pass.

        ``joined``: this rank took part for the others only, so the order learns nothing from it.
        """
        if not self._gathers.active:
            return
        while self._gathers.remaining:
            self._release(self._gathers.issue_next())
        for unit in self._units:
            self._release(unit)
        self._gathers.close(observed=not joined)

    def abandon(self) -> None:
        """End a pass that failed: release every unit that is not pinned, and learn nothing. Only where every rank has
        issued the same gathers, as those in flight are waited for."""
        self._gathers.abandon()
        for unit in self._units:
            self._release(unit)

    def reset(self) -> None:
        """Forget the running pass and all learned orders; only when no gather is in flight."""
        self._gathers.reset()
        self._kept.clear()

    @outside_transforms
    def _gather_absent(self, unit: Unit) -> None:
        """Gather ``unit``, which is not gathered in this pass, prefetch the next units, and release unused ones while
        more than ``max_live_numel`` elements are gathered."""
        if not self._gathers.is_issued(unit):
            self._issue(unit)
        self._wait(unit)
        self._prefetch()
        self._evict(unit)

    def _issue(self, unit: Unit) -> None:
        """Issue the gather of ``unit`` and those before it in the pass's order; where the order cannot give it, issue
        the rest of the order and request the unit from all ranks."""
        if self._gathers.issue_through(unit):
            return
        if self._gathers.active:
            self._kept.setdefault(self._gathers.key, set()).add(unit.index)
            self._gathers.issue_until(len(self._gathers.order))
        self._waits.before_unscheduled_gather()
        self._request(unit.index)

    def _wait(self, unit: Unit) -> None:
        """Wait for the gather of ``unit`` if one is in flight, after starting the reductions that other ranks may wait
        for."""
        if unit.state is UnitState.GATHERING:
            self._waits.before_gather(unit)
            unit.wait_gather()

    @outside_transforms
    def _release(self, unit: Unit) -> None:
        """Release ``unit`` unless it is pinned; a gather of it in flight is waited for first."""
        if not unit.pinned:
            self._wait(unit)
            unit.release()

    def _prefetch(self) -> None:
        """Issue the next gathers of the pass as far as the bounds allow, and prefetch the shards of those after; do
        nothing outside a pass."""
        if not self._gathers.active:
            return
        remaining = self._gathers.remaining
        self._prefetch_shards(remaining)
        for place, index in enumerate(remaining):
            numel = self._units[index].layout.numel
            first = self._live.coming == 0 and self._prefetch_numel > 0
            fits = self._live.coming + numel <= self._prefetch_numel and self._live.live + numel <= self._max_live_numel
            if not first and not fits:
                self._prefetch_shards(remaining[place:])
                return
            self._gathers.issue_next()

    def _prefetch_shards(self, indices: Sequence[int]) -> None:
        """Ask the tier for the shards of the next units, all at once and before the first one is waited for.

        ``indices``: of the units still to be gathered, in order; only the first `_PREFETCHED_SHARDS` count.
        """
        self._residency.prefetch([self._units[index].name for index in indices[:_PREFETCHED_SHARDS]])

    def _evict(self, needed: Unit) -> None:
        """While more than ``max_live_numel`` elements are gathered, release units that this rank has not used in the
        pass, in the order of their gathers, but not ``needed``. Do nothing outside a pass."""
        if not self._gathers.active or self._live.live <= self._max_live_numel:
            return
        for index in self._gathers.order[: self._gathers.issued]:
            if index != needed.index and index not in self._gathers.used:
                self._wait(self._units[index])
                self._release(self._units[index])
                if self._live.live <= self._max_live_numel:
                    return
