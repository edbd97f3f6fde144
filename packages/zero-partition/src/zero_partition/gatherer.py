"""Gathering and releasing units: prefetching within the agreed order, and when a unit is released.

The running pass is a forward or backward pass; a key names passes that use units in the same order. The order of a pass
is that of its gathers, on which the ranks have agreed (`OrderedGathers`). To issue a gather is to start it. A
releasable unit is one that may be released, where parameters are sharded; a pinned unit stays gathered for the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .dispatch_modes import outside_transforms
from .live import LiveElements, UnitState
from .ordered_gathers import OrderedGathers
from .residency import Residency
from .unit import Unit

_PREFETCHED_SHARDS = 8  # units whose shards a slow tier is asked for before they are gathered


class GatherWaits(Protocol):
    """Starts what a rank must have started before it blocks on a gather, so that no other rank waits for it in turn;
    see [Note: waits] in interleaving.py."""

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
        self._requested: dict[str, set[int]] = {}
        self._turn = -1
        self._behind: dict[int, None] = {}
        self._reached = 0

    def begin(
        self,
        key: str,
        *,
        like_reversed: str | None = None,
        order: Sequence[int] | None = None,
        restores: bool = False,
        before: str | None = None,
    ) -> None:
        """Start the pass of this ``key`` and, on a tier, the loading of the shards that it gathers first. ``key``,
        ``like_reversed``, ``order``, ``restores``: see `OrderedGathers.begin`.

        ``before``: key of the pass that is expected to follow, None for none. The unit that it gathers first stays
        gathered for it if the running pass is done with that unit when all others are gathered.
        """
        self._gathers.begin(key, like_reversed=like_reversed, order=order, restores=restores)
        self._turn = -1 if before is None else self._gathers.first_of(before, after=key)
        self._behind.clear()
        self._reached = 0
        kept = self._gathers.kept
        first = self._gathers.ahead(_PREFETCHED_SHARDS + 1)
        self._prefetch_shards([index for index in first if index != kept][:_PREFETCHED_SHARDS])

    def gather(self, unit: Unit) -> None:
        """Gather ``unit``, wait until its parameters are full, and prefetch the next units of the pass.

        Does nothing for a unit that is never released; only records the use of one that is gathered in this pass
        already. Outside a pass, or where the pass's order cannot give the unit, all ranks have to join (see [Note:
        requests] in agreement.py).
        """
        if not unit.releasable:
            return
        self._gathers.note_use(unit)
        if self._gathers.is_present(unit):
            return
        self._gather_absent(unit)

    def release(self, unit: Unit) -> None:
        """Release ``unit``, whose modules have run in this pass. Do nothing if it is pinned, never released, or
        released already; if the memory of a released unit is kept for this pass, it stays. A unit that the order lacks,
        and that was requested in a pass of this key, stays until the end of the pass."""
        if unit.state is UnitState.RELEASED:
            return
        if unit.releasable and unit.index not in self._requested.get(self._gathers.key, ()):
            self._release(unit)

    def release_before(self, unit: Unit, is_running: Callable[[Unit], bool]) -> None:
        """Release the gathered frozen units of a single module that stand at least two places before ``unit`` in the
        pass's order and for which ``is_running`` is False: backward may be done with them, and no gradient tells when.
        A unit that could not be released is tried again in later calls of the pass."""
        end = max(0, self._gathers.position(unit) - 1)
        for index in self._gathers.order[self._reached : end]:
            plan = self._units[index].plan
            if not plan.trainable and len(plan.members) == 1:
                self._behind[index] = None
        self._reached = max(self._reached, end)
        for index in list(self._behind):
            other = self._units[index]
            if other.state is UnitState.GATHERED and self._gathers.position(other) < end and not is_running(other):
                self.release(other)
            if other.state is UnitState.RELEASED:
                del self._behind[index]

    def end(self, *, joined: bool = False) -> None:
        """End the pass: issue the gathers that this rank did not need, wait for those in flight, and release every unit
        that is not pinned; do nothing outside a pass. Every rank calls it, as all issue the same gathers.

        ``joined``: this rank took part for the others only, so the order learns nothing from its uses.
        """
        if not self._gathers.active:
            return
        while self._gathers.left:
            self._release(self._gathers.issue_next())
        for unit in self._units:
            self._release(unit)
        self._gathers.close(observed=not joined)

    def abandon(self) -> None:
        """End a pass that failed: release every unit that is not pinned, and learn nothing. Only where every rank has
        issued the same gathers, as those in flight are waited for."""
        self._gathers.abandon()
        self._turn = -1
        for unit in self._units:
            self._release(unit)

    def reset(self) -> None:
        """Forget the running pass and all learned orders; only when no gather is in flight."""
        self._gathers.reset()
        self._requested.clear()

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
            self._requested.setdefault(self._gathers.key, set()).add(unit.index)
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
        """Release ``unit`` unless it is pinned; a gather of it in flight is waited for first. The unit that the next
        pass gathers first is kept gathered instead, where `_may_keep` allows."""
        if not unit.pinned:
            self._wait(unit)
            if self._may_keep(unit):
                self._gathers.keep(unit)
            else:
                unit.release()

    def _may_keep(self, unit: Unit) -> bool:
        """Return whether ``unit`` may stay gathered for the next pass: that pass gathers it first (``before`` of
        `begin`), no gather of the running one remains, and ``max_live_numel`` allows a unit of this size."""
        return unit.index == self._turn and not self._gathers.left and unit.layout.numel <= self._max_live_numel

    def _prefetch(self) -> None:
        """Issue the next gathers of the pass as far as the bounds allow, and prefetch the shards of those after; do
        nothing outside a pass."""
        if not self._gathers.active:
            return
        self._prefetch_shards(self._gathers.ahead(_PREFETCHED_SHARDS))
        while self._gathers.left:
            numel = self._units[self._gathers.ahead(1)[0]].layout.numel
            first = self._live.coming == 0 and self._prefetch_numel > 0
            fits = self._live.coming + numel <= self._prefetch_numel and self._live.live + numel <= self._max_live_numel
            if not first and not fits:
                self._prefetch_shards(self._gathers.ahead(_PREFETCHED_SHARDS))
                return
            self._gathers.issue_next()

    def _prefetch_shards(self, indices: Sequence[int]) -> None:
        """Ask the tier for the shards of the units ``indices``, which are gathered next, all at once and before the
        first is waited for. Units that an update still writes are left out."""
        units = [self._units[index] for index in indices]
        self._residency.prefetch([u.name for u in units if u.states is None or not u.states.is_updating(u.name)])

    def _evict(self, needed: Unit) -> None:
        """While more than ``max_live_numel`` elements are gathered, release units that were gathered in this pass but
        not used on this rank, in the order of their gathers, except ``needed``. Do nothing outside a pass."""
        if not self._gathers.active or self._live.live <= self._max_live_numel:
            return
        for index in self._gathers.order[: self._gathers.issued]:
            if index != needed.index and index not in self._gathers.used:
                self._wait(self._units[index])
                self._release(self._units[index])
                if self._live.live <= self._max_live_numel:
                    return
