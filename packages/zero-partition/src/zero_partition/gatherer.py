"""Gathering units: in which order, when each one comes, and when it goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, cast

from .dispatch_modes import outside_transforms
from .host_facts import storage_address
from .live import LiveElements
from .messages import StepNumber
from .residency import Residency
from .schedule import GatherSchedule, merge_orders
from .unit import Unit, UnitState

_SOON = 8  # units whose shards a slow tier is asked for before they are gathered


class OrderedGathers:
    """The gathers of one engine, issued in the order that the ranks have agreed for each pass.

    Issuing a gather never waits for another rank. ``step`` is the number that each gather carries.
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
        """Name of the running pass, else of the last one."""
        return self._key

    @property
    def order(self) -> Sequence[int]:
        """The running pass's order, else the last one's."""
        schedule = self._schedule if self._schedule is not None else self._schedules.get(self._key)
        return () if schedule is None else schedule.order

    @property
    def used(self) -> Collection[int]:
        """Units that this rank has used in the running pass, in order of first use."""
        return self._used.keys()

    @property
    def issued(self) -> int:
        """How many gathers of the running pass's order this rank has issued."""
        return 0 if self._schedule is None else self._schedule.issued

    @property
    def remaining(self) -> Sequence[int]:
        """Units of the running pass's order that are not issued yet."""
        return () if self._schedule is None else self._schedule.remaining()

    def position(self, unit: Unit) -> int:
        """Place of a unit in the running pass's order; -1 when it is not in it."""
        return self._schedule.position(unit.index) if self._schedule is not None else -1

    def use(self, unit: Unit) -> None:
        """Note that this rank uses ``unit`` in the running pass."""
        if self._schedule is not None:
            self._used[unit.index] = None

    def is_present(self, unit: Unit) -> bool:
        """Return whether ``unit`` is gathered with the values of the running pass."""
        return unit.index in self._fresh and unit.state is UnitState.GATHERED

    def is_used(self, unit: Unit) -> bool:
        """Return whether this rank uses ``unit`` in the running pass, and it is present."""
        return unit.index in self._used and self.is_present(unit)

    def is_coming(self, unit: Unit) -> bool:
        """Return whether the gather of ``unit`` was issued in the running pass, and it has not been released since."""
        return unit.index in self._fresh and unit.state is not UnitState.RELEASED

    def begin(self, key: str, *, like_reversed: str | None = None) -> None:
        """Start the pass ``key``. Until its order is learned, it is the order of ``like_reversed`` backwards, or
        module order."""
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
        """Issue the next gather of the running pass's order, and return its unit; only when some are `remaining`."""
        schedule = cast(GatherSchedule, self._schedule)
        unit = self._units[schedule.order[schedule.issued]]
        schedule.advance(1)
        self._issue(unit)
        self._fresh.add(unit.index)
        return unit

    def issue_until(self, count: int) -> None:
        """Have issued at least the first ``count`` gathers of the running pass's order."""
        while self._schedule is not None and self._schedule.issued < min(count, len(self._schedule.order)):
            self.issue_next()

    def issue_through(self, unit: Unit) -> bool:
        """Have issued the gathers up to that of ``unit``; return False where the pass cannot give it any more."""
        ahead = self._schedule.pending_until(unit.index) if self._schedule is not None else None
        if ahead is None:
            return False
        self.issue_until(self.issued + len(ahead))
        return True

    def serve(self, index: int, mine: bool) -> None:
        """Take part in gathering a requested unit, for this rank or only for others; all ranks at the same point."""
        self.issue_until(len(self.order))  # the group's order is the same on all ranks
        unit = self._units[index]
        absent = unit.state is UnitState.RELEASED
        self._issue(unit)
        if mine:
            self._fresh.add(index)
        elif absent:
            unit.release()

    def unit_of_storage(self, address: int) -> Unit | None:
        """The gathered unit whose flat buffer lives at ``address``."""
        unit = self._by_address.get(address)
        return unit if unit is not None and unit.holds_storage(address) else None

    def note_outside(self, unit: Unit) -> None:
        """``unit`` was gathered outside passes, until `release_outside`."""
        self._outside.append(unit)

    def release_outside(self) -> None:
        """Release what was gathered outside passes; graphs keep the memory that they saved."""
        outside, self._outside = self._outside, []
        for unit in outside:
            if not unit.pinned:
                unit.release()

    def close(self, *, observed: bool) -> None:
        """The running pass is over; ``observed``: this rank has seen which units it uses."""
        order = set(self.order)
        if observed and (self._key not in self._learned or not order.issuperset(self._used)):
            self._observed[self._key] = list(self._used)
        self._schedule = None

    def abandon(self) -> None:
        """The running pass has failed; nothing is learned of it."""
        self._schedule = None
        self._used = {}
        self._fresh.clear()

    def reset(self) -> None:
        """The running pass has failed, and ranks may have learned different orders: all of them are forgotten."""
        self.abandon()
        self._schedules.clear()
        self._learned.clear()
        self._observed.clear()
        self._outside.clear()

    def take_observed(self) -> dict[str, list[int]]:
        """Return what this rank observed since this was asked last: pass -> units in order of first use."""
        observed, self._observed = self._observed, {}
        return observed

    def learn(self, observed_by_rank: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Merge the ranks' observations (rank order) into the orders; same result on every rank."""
        for key in dict.fromkeys(k for observed in observed_by_rank for k in observed):
            base = [self._schedules[key].order] if key in self._learned else []
            order = merge_orders([*base, *(observed[key] for observed in observed_by_rank if key in observed)])
            self._schedules[key] = GatherSchedule(order)
            self._learned.add(key)

    def _issue(self, unit: Unit) -> None:
        unit.issue_gather(self._step.value)
        self._by_address[unit.flat.untyped_storage().data_ptr() or storage_address(unit.flat)] = unit


class GatherWaits(Protocol):
    """The duties of a rank before it waits for a gather."""

    def before_gather(self, unit: Unit, /) -> None:
        """This rank is about to wait for the gather of ``unit``."""

    def before_request(self) -> None:
        """This rank is about to wait until every rank takes part in a requested gather."""


class Gatherer:
    """Gathers releasable units when modules need them, some ahead of that, and releases them.

    ``waits``: is told before this rank waits. ``request``: gathers a unit (by index) that the pass's order cannot give,
    with all ranks (see agreement.py). ``residency``: is told which shards will be needed soon. ``live``: counts the
    units' elements. ``prefetch_numel`` bounds those in flight ahead of use, ``max_live_numel`` those gathered; the unit
    that is needed now is gathered whatever the bounds.
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
        """Start the pass ``key`` (see `OrderedGathers.begin`)."""
        self._gathers.begin(key, like_reversed=like_reversed)
        self._announce(self._gathers.remaining)

    def gather(self, unit: Unit) -> None:
        """Return when the parameters of ``unit`` are full, and have the next units on their way."""
        if not unit.releasable:
            return
        self._gathers.use(unit)
        if self._gathers.is_present(unit):
            return
        self._bring(unit)

    def release(self, unit: Unit) -> None:
        """The unit's modules have run in this pass: release it unless it is known to be used again."""
        if unit.releasable and unit.index not in self._kept.get(self._gathers.key, ()):
            self._release(unit)

    def release_before(self, unit: Unit, may_go: Callable[[Unit], bool]) -> None:
        """Release gathered units that the pass's order puts more than one place before ``unit`` and that ``may_go``."""
        for index in self._gathers.order[: max(0, self._gathers.position(unit) - 1)]:
            if self._units[index].state is UnitState.GATHERED and may_go(self._units[index]):
                self.release(self._units[index])

    def end(self, *, joined: bool = False) -> None:
        """Finish the pass: join the gathers that this rank did not need, release everything.

        ``joined``: this rank took part for the others only, and has observed nothing.
        """
        if not self._gathers.active:
            return
        while self._gathers.remaining:
            self._release(self._gathers.issue_next())
        for unit in self._units:
            self._release(unit)
        self._gathers.close(observed=not joined)

    def abandon(self) -> None:
        """End a pass that failed: release everything, learn nothing. Every rank has issued the same gathers."""
        self._gathers.abandon()
        for unit in self._units:
            self._release(unit)

    def reset(self) -> None:
        """Forget the running pass and all that was learned; no gather travels any more."""
        self._gathers.reset()
        self._kept.clear()

    @outside_transforms
    def _bring(self, unit: Unit) -> None:
        if not self._gathers.is_coming(unit):
            self._issue(unit)
        self._wait(unit)
        self._prefetch()
        self._evict(unit)

    def _issue(self, unit: Unit) -> None:
        """Issue the gather of ``unit`` and those before it, or request it where the pass cannot give it."""
        if self._gathers.issue_through(unit):
            return
        if self._gathers.active:
            self._kept.setdefault(self._gathers.key, set()).add(unit.index)
            self._gathers.issue_until(len(self._gathers.order))
        self._waits.before_request()
        self._request(unit.index)

    def _wait(self, unit: Unit) -> None:
        if unit.state is UnitState.GATHERING:
            self._waits.before_gather(unit)
            unit.wait_gather()

    @outside_transforms
    def _release(self, unit: Unit) -> None:
        if not unit.pinned:
            self._wait(unit)
            unit.release()

    def _prefetch(self) -> None:
        """Issue the gathers that come next, as far as the bounds allow."""
        if not self._gathers.active:
            return
        remaining = self._gathers.remaining
        self._announce(remaining)
        for place, index in enumerate(remaining):
            numel = self._units[index].layout.numel
            if self._live.coming + numel > self._prefetch_numel or self._live.live + numel > self._max_live_numel:
                self._announce(remaining[place:])
                return
            self._gathers.issue_next()

    def _announce(self, coming: Sequence[int]) -> None:
        """Ask a slow tier for the shards of the next units, all at once and before anybody waits for the first."""
        self._residency.prefetch([self._units[index].name for index in coming[:_SOON]])

    def _evict(self, needed: Unit) -> None:
        """Above the live bound, release gathered units that were only joined, not used, oldest first."""
        if not self._gathers.active or self._live.live <= self._max_live_numel:
            return
        for index in self._gathers.order[: self._gathers.issued]:
            if index != needed.index and index not in self._gathers.used:
                self._wait(self._units[index])
                self._release(self._units[index])
                if self._live.live <= self._max_live_numel:
                    return
