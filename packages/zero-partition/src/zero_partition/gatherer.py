"""Which units are present, when they come, and when they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .schedule import GatherSchedule, merge_orders
from .unit import Unit, UnitState

_SOON = 8  # units whose shards a slow tier is asked for before they are gathered


class Gatherer:
    """Brings releasable units in the agreed order of the running pass.

    ``prefetch_numel`` bounds the elements in flight ahead of use, ``max_live_numel`` those gathered; the unit that is
    needed now is gathered whatever the bounds. ``request`` gathers a unit out of order with all ranks (see
    passes.py).

    Attributes:
        before_wait: called before this rank waits for the gather of a unit.
        before_request: called before this rank waits for the others to take part in a request.
        soon: called with the units whose shards will be gathered after those in flight, in order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        request: Callable[[int], None],
        *,
        prefetch_numel: int,
        max_live_numel: int,
    ) -> None:
        self._units = units
        self._request = request
        self._prefetch_numel = prefetch_numel
        self._max_live_numel = max_live_numel
        self._releasable = [u.index for u in units if u.releasable]
        self._schedules: dict[str, GatherSchedule] = {}
        self._learned: set[str] = set()
        self._held: dict[str, set[int]] = {}
        self._key = ""
        self._schedule: GatherSchedule | None = None
        self._used: dict[int, None] = {}
        self._fresh: set[int] = set()
        self._pinned: dict[int, int] = {}
        self._news: dict[str, list[int]] = {}
        self.before_wait: Callable[[Unit], None] = lambda unit: None
        self.before_request: Callable[[], None] = lambda: None
        self.soon: Callable[[Sequence[Unit]], None] = lambda units: None
        self.step = 0

    @property
    def active(self) -> bool:
        """Whether a pass is running."""
        return self._schedule is not None

    @property
    def order(self) -> Sequence[int]:
        """The running pass's order, else the last one's."""
        return self._schedules[self._key].order if self._key in self._schedules else ()

    @property
    def used(self) -> Sequence[int]:
        """Units that this rank has needed in the running pass, in order of first use."""
        return list(self._used)

    @property
    def issued(self) -> int:
        """How many gathers of the running pass's order this rank has issued."""
        return 0 if self._schedule is None else self._schedule.issued

    def position(self, unit: Unit) -> int:
        """Place of a unit in the running pass's order; -1 when it is not in it."""
        return self._schedule.position(unit.index) if self._schedule is not None else -1

    def issue_until(self, count: int) -> None:
        """Have issued at least the first ``count`` gathers of the running pass's order."""
        while self._schedule is not None and self._schedule.issued < min(count, len(self._schedule.order)):
            self._issue(self._schedule.order[self._schedule.issued])

    def take_news(self) -> dict[str, list[int]]:
        """What this rank observed since the last agreement: pass name -> units in order of use."""
        news, self._news = self._news, {}
        return news

    def learn(self, news_by_rank: Sequence[dict[str, list[int]]]) -> None:
        """Merge the ranks' observations (rank order) into the schedules; same result on every rank."""
        for key in dict.fromkeys(k for news in news_by_rank for k in news):
            base = [self._schedules[key].order] if key in self._learned else []
            order = merge_orders([*base, *(news[key] for news in news_by_rank if key in news)])
            self._schedules[key] = GatherSchedule(order)
            self._learned.add(key)

    def begin(self, key: str, *, like_reversed: str | None = None) -> None:
        """Start the pass ``key``. Until its order is learned, it is the order of ``like_reversed`` backwards, or
        module order."""
        if key not in self._schedules:
            known = (
                self._schedules[like_reversed].order
                if like_reversed in self._learned and like_reversed is not None
                else None
            )
            self._schedules[key] = GatherSchedule(known[::-1] if known is not None else self._releasable)
        self._key = key
        self._schedule = self._schedules[key]
        self._schedule.restart()
        self._announce(self._schedule.remaining())
        self._used = {}
        self._fresh.clear()

    def pin(self, unit: Unit) -> None:
        """Keep a gathered unit through passes until `unpin`; pins count."""
        self._pinned[unit.index] = self._pinned.get(unit.index, 0) + 1

    def pinned(self, unit: Unit) -> bool:
        """Whether a unit stays gathered through passes."""
        return unit.index in self._pinned

    def unpin(self, unit: Unit) -> None:
        """Take one pin away; the last one releases the unit, whose values the user may still hold."""
        self._pinned[unit.index] -= 1
        if not self._pinned[unit.index]:
            del self._pinned[unit.index]
            unit.hand_over()

    def has(self, unit: Unit) -> bool:
        """Whether this rank has needed ``unit`` in the running pass before and it is still whole."""
        return unit.index in self._used and unit.index in self._fresh and unit.state is UnitState.GATHERED

    def need(self, unit: Unit) -> None:
        """Make ``unit`` present; returns when its parameters are whole."""
        if not unit.releasable:
            return
        if self._schedule is not None:
            self._used[unit.index] = None
        if unit.index in self._fresh and unit.state is UnitState.GATHERED:
            return
        if unit.index not in self._fresh or unit.state is UnitState.RELEASED:
            self._bring(unit)
        self._wait(unit)
        self._prefetch()
        self._evict(unit)

    def leave(self, unit: Unit) -> None:
        """The unit's modules have run in this pass; release it unless it is known to be used again."""
        if unit.releasable and unit.index not in self._held.get(self._key, ()):
            self._release(unit)

    def leave_before(self, unit: Unit, may_go: Callable[[Unit], bool]) -> None:
        """Release gathered units that the pass's order puts more than one place before ``unit`` and that ``may_go``."""
        order = self._schedule.order if self._schedule is not None else []
        if unit.index in order:
            for index in order[: max(0, order.index(unit.index) - 1)]:
                if self._units[index].state is UnitState.GATHERED and may_go(self._units[index]):
                    self.leave(self._units[index])

    def end(self, *, joined: bool = False) -> None:
        """Finish the pass: join the gathers that this rank did not need, release everything.

        ``joined``: this rank took part for the others only, and has observed nothing.
        """
        schedule = self._schedule
        if schedule is None:
            return
        for index in schedule.remaining():
            self._issue(index)
            self._release(self._units[index])
        for unit in self._units:
            self._release(unit)
        if not joined and (self._key not in self._learned or not set(self._used) <= set(schedule.order)):
            self._news[self._key] = list(self._used)
        self._schedule = None

    def abandon(self) -> None:
        """End a pass that failed: release everything, learn nothing. Every rank has issued the same gathers."""
        self._schedule = None
        self._used = {}
        self._fresh.clear()
        for unit in self._units:
            self._release(unit)

    def serve(self, index: int, mine: bool) -> None:
        """Take part in gathering a requested unit, for this rank or only for others; all ranks at the same point."""
        if self._schedule is not None:
            self.issue_until(len(self._schedule.order))  # the group's order is the same on all ranks
        unit = self._units[index]
        absent = unit.state is UnitState.RELEASED
        unit.issue_gather(self.step, exact=self.pinned(unit))
        if mine:
            self._fresh.add(index)
        elif absent:
            unit.release()

    def _bring(self, unit: Unit) -> None:
        schedule = self._schedule
        ahead = schedule.pending_until(unit.index) if schedule is not None else None
        if ahead is not None:
            for index in ahead:
                self._issue(index)
            return
        if schedule is not None:
            self._held.setdefault(self._key, set()).add(unit.index)
            for index in schedule.remaining():
                self._issue(index)
        self.before_request()
        self._request(unit.index)

    def _issue(self, index: int) -> None:
        """Issue the next gather of the order."""
        if self._schedule is not None:
            self._schedule.advance(1)
        self._gather(self._units[index])

    def _gather(self, unit: Unit) -> None:
        unit.issue_gather(self.step, exact=self.pinned(unit))
        self._fresh.add(unit.index)

    def _wait(self, unit: Unit) -> None:
        if unit.state is UnitState.GATHERING:
            self.before_wait(unit)
            unit.wait_gather()

    def _release(self, unit: Unit) -> None:
        if unit.index not in self._pinned:
            self._wait(unit)
            unit.release()

    def _prefetch(self) -> None:
        if self._schedule is None:
            return
        ahead = sum(u.layout.numel for u in self._units if u.state is UnitState.GATHERING)
        live = self._live()
        remaining = self._schedule.remaining()
        self._announce(remaining)
        for place, index in enumerate(remaining):
            numel = self._units[index].layout.numel
            if ahead + numel > self._prefetch_numel or live + numel > self._max_live_numel:
                self._announce(remaining[place:])
                return
            self._issue(index)
            ahead, live = ahead + numel, live + numel

    def _announce(self, coming: Sequence[int]) -> None:
        """Ask a slow tier for the shards of the next units, all at once and before anybody waits for the first."""
        self.soon([self._units[index] for index in coming[:_SOON]])

    def _evict(self, needed: Unit) -> None:
        """Above the live bound, release gathered units that were only joined, not used, oldest first."""
        schedule = self._schedule
        if schedule is None or self._live() <= self._max_live_numel:
            return
        for index in schedule.order[: schedule.issued]:
            if index != needed.index and index not in self._used:
                self._wait(self._units[index])
                self._release(self._units[index])
                if self._live() <= self._max_live_numel:
                    return

    def _live(self) -> int:
        return sum(u.layout.numel for u in self._units if u.releasable and u.state is not UnitState.RELEASED)
