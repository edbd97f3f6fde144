"""When each unit's gradients are averaged: one agreed order, as much as possible while backward runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from zero_comm import Work

from .errors import PartitionError
from .gradients import UnitGradients

_IN_FLIGHT = 2  # reductions whose local sum is still to do: one travels while the next unit fills
_LEARNING_PASSES = 3  # passes whose order and gates are learned at most, when they do not repeat before


class Reducer:
    """Starts the reductions of one backward pass in the agreed order.

    A unit is due when all the gradients that it had last time have arrived, or when its modules did not run here:
    then it contributes zeros without waiting. What is not due by the end of the pass is flushed there. Gradients that
    arrive after their unit was reduced stay, are announced at the next agreement point, and are reduced then.

    ``complete``: every pass reduces every unit, and a unit whose modules ran waits for all its gradients or for the end
    of the pass, whatever it had last time; late gradients are refused (`refuse_late`).

    Attributes:
        before_wait: called with a reduction's number in this pass and its gate (pace.py) before this rank waits for it.
        gather_order: the gathers of this pass.
        used: the units that this rank has needed so far in this pass.
        started: how many reductions this pass has started.
        settled: the order and the gates are learned.
        torn: why the gradients hold a part of a backward pass only, which failed; None where they do not.
        complete: as given.
    """

    def __init__(
        self, gradients: Sequence[UnitGradients], device: torch.device, *, bucket_numel: int, complete: bool = False
    ) -> None:
        self._by_unit = {g.unit.index: g for g in gradients}
        self._device = device
        self._bucket_numel = bucket_numel
        self.complete = complete
        self._order = [g.unit.index for g in reversed(gradients)]
        self._expected = {g.unit.index: len(g.unit.parameters) for g in gradients}
        self._arrived = dict.fromkeys(self._by_unit, 0)
        self._finished: dict[int, int] = {}
        self._used_then: list[int] = []
        self._steady = True
        self._queue: deque[int] | None = None
        self._works: deque[tuple[int, int, Work]] = deque()
        self._ran: set[int] = set()
        self._learned = 0
        self._last_needed: dict[int, int | None] = {}
        self._gates: dict[int, int] = {}
        self.before_wait: Callable[[int, int], None] = lambda number, gate: None
        self.gather_order: Callable[[], Sequence[int]] = lambda: ()
        self.used: Callable[[], Sequence[int]] = lambda: ()
        self.started = 0
        self.settled = False
        self.torn: str | None = None
        self.step = 0

    @property
    def active(self) -> bool:
        """Whether a reducing backward pass is running."""
        return self._queue is not None

    def mark_ran(self, unit: int) -> None:
        """Note that the unit's modules run in a forward whose gradients may come."""
        if unit in self._by_unit:
            self._ran.add(unit)

    def pending(self) -> list[int]:
        """Units of this rank that a reducing backward pass has to consider."""
        return sorted(self._by_unit if self.complete else self._ran | set(self.unreduced()))

    def unreduced(self) -> list[int]:
        """Units with gradients that no reduction has taken."""
        return [index for index, g in self._by_unit.items() if g.has_unreduced]

    def observed(self) -> dict[str, Any] | None:
        """What this rank saw in the last pass, until an order is settled: units in order of completion, with how many
        of the ``used`` units it had needed by then."""
        if self.settled or self.active or not self._finished:
            return None
        return {"finished": list(self._finished.items()), "used": self._used_then, "steady": self._steady}

    def learn(self, observed: Sequence[dict[str, Any] | None]) -> None:
        """Adopt the order of the first rank that saw one, and gates that fit what every rank saw (rank order)."""
        seen = [o for o in observed if o is not None]
        first = [unit for unit, _ in seen[0]["finished"]]
        self._order = [*first, *(i for i in self._order if i not in first)]
        place = {unit: number for number, unit in enumerate(self.gather_order())}
        needed: dict[int, set[int]] = {}
        for one in seen:
            for unit, count in one["finished"]:
                needed.setdefault(unit, set()).update(one["used"][:count])
        self._last_needed = {
            unit: max((u for u in units if u in place), key=place.__getitem__, default=None)
            for unit, units in needed.items()
        }
        self._learned += 1
        self.settled = all(o["steady"] for o in seen) or self._learned >= _LEARNING_PASSES
        self._finished = {}

    def begin(self, units: set[int]) -> None:
        """Start a reducing pass over ``units`` (those that any rank has to consider); the same set on every rank."""
        self._queue = deque(index for index in self._order if index in units)
        self._arrived = dict.fromkeys(self._by_unit, 0)
        self._finished = {}
        self._steady = True
        self.started = 0
        self._gates = self._find_gates()
        self._advance()

    def arrived(self, index: int) -> bool:
        """Count one gradient of a unit; True when it was the last one expected in this pass."""
        self._arrived[index] += 1
        last = self._arrived[index] == self._expected[index]
        ready = self._by_unit[index].has_all if self.complete else last
        if ready and index not in self._finished:
            self._finished[index] = len(self.used())
            self._advance()
        return last

    def give_way(self, position: int | None) -> None:
        """Start the reductions whose gates are at most ``position`` in the gathers' order (None: all of them), with
        the gradients that are there."""
        while self._queue and (position is None or self._gates[self._queue[0]] <= position):
            self._start(self._queue.popleft())

    def start_until(self, count: int) -> None:
        """Have started the pass's first ``count`` reductions, with the gradients that are there."""
        while self._queue and self.started < count:
            self._start(self._queue.popleft())

    def abandon(self) -> None:
        """End a pass that failed: wait for the reductions that were started, which every rank has started."""
        self._drain()
        self._queue = None
        self._ran.clear()
        self._finished = {}

    def take_far(self, position: int | None) -> None:
        """Take the reductions whose gates are at most ``position`` (None: all of them) to their last hop; they have
        been started by `give_way`, here and wherever they are needed."""
        for index, _, work in self._works:
            if position is None or self._gates[index] <= position:
                work.advance()

    def take_far_started(self, count: int) -> None:
        """Take the pass's first ``count`` reductions, which every rank has started, to their last hop."""
        first = self.started - len(self._works)
        for number, (_, _, work) in enumerate(self._works, start=first):
            if number < count:
                work.advance()

    def start_rest(self) -> None:
        """All gradients of the pass are there: start what is left, in order."""
        if self._queue is None:
            return
        for index, count in self._arrived.items():
            if count and self.complete:
                self._finished.setdefault(index, len(self.used()))
            if count and self._expected[index] != count:
                self._expected[index] = count
                self._finished[index] = len(self.used())
                self._steady = False
        self._used_then = list(self.used())
        while self._queue:
            self._start(self._queue.popleft())

    def finish(self) -> None:
        """End the pass: wait for every reduction."""
        self._drain()
        self._queue = None
        self._ran.clear()

    def refuse_late(self) -> None:
        """Where passes are complete: refuse, by name, gradients that came after their unit was reduced."""
        late = self.unreduced() if self.complete else []
        if late:
            gradients = self._by_unit[late[0]]
            name = next(n for n, p in zip(gradients.unit.names, gradients.present, strict=True) if p)
            raise PartitionError(
                f"the gradient of '{name}' came after its unit's reduction had begun: the parameter is used outside "
                "the modules that ran, or backward passes are nested (reentrant activation checkpointing). Under "
                "deterministic.across_world_sizes a micro-batch's gradient has to be complete before it is summed. Use "
                "the parameter inside its module's forward, and non-reentrant activation checkpointing."
            )

    def reduce_now(self, units: set[int]) -> None:
        """Reduce ``units`` outside a pass (late gradients); the same set on every rank."""
        for index in self._order:
            if index in units:
                self._start(index)
        self._drain()

    def clear(self) -> None:
        """Forget all gradients."""
        self.torn = None
        self._ran.clear()
        for gradients in self._by_unit.values():
            gradients.clear()

    def _advance(self) -> None:
        while self._queue and self._due(self._queue[0]):
            self._start(self._queue.popleft())

    def _due(self, index: int) -> bool:
        if self._by_unit[index].has_all if self.complete else self._arrived[index] >= self._expected[index]:
            return True
        return index not in self._ran and not self._by_unit[index].has_unreduced

    def _find_gates(self) -> dict[int, int]:
        """By unit, the gathers that must have been issued before anybody waits for its reduction."""
        order = self.gather_order()
        after: dict[int | None, int] = {unit: number + 1 for number, unit in enumerate(order)}
        after[None] = 0
        unknown = len(order)
        gates = [after.get(self._last_needed[u], unknown) if u in self._last_needed else unknown for u in self._order]
        return dict(zip(self._order, accumulate(gates, max), strict=True))

    def _start(self, index: int) -> None:
        gradients = self._by_unit[index]
        work = gradients.start_reduce(self.step, self._device)
        self._works.append((index, gradients.unit.layout.numel, work))
        self.started += 1
        self._advance_older()
        while len(self._works) > _IN_FLIGHT or sum(numel for _, numel, _ in self._works) > self._bucket_numel:
            self._wait_first()

    def _advance_older(self) -> None:
        """The reductions before the newest go on to their last hop, where they have several, while the next unit
        computes."""
        first = self.started - len(self._works)
        for number, (index, _, work) in enumerate(list(self._works)[:-1], start=first):
            if work.has_hops:
                if self.active:
                    self.before_wait(number, self._gates[index])
                work.advance()

    def _wait_first(self) -> None:
        index, _, work = self._works.popleft()
        if self.active:
            self.before_wait(self.started - len(self._works) - 1, self._gates[index])
        work.wait()
        self._by_unit[index].end_reduce()

    def _drain(self) -> None:
        while self._works:
            self._wait_first()
