"""When each unit's gradients are averaged: one agreed order, as much as possible while backward runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from zero_comm import Work

from .gradients import UnitGradients

_IN_FLIGHT = 2  # reductions whose local sum is still to do: one travels while the next unit fills


class Reducer:
    """Starts the reductions of one backward pass in the agreed order.

    A unit is due when all the gradients that it had last time have arrived, or when its modules did not run here:
    then it contributes zeros without waiting. What is not due by the end of the pass is flushed there. Gradients that
    arrive after their unit was reduced stay, are announced at the next agreement point, and are reduced then.
    """

    def __init__(self, gradients: Sequence[UnitGradients], device: torch.device, *, bucket_numel: int) -> None:
        self._by_unit = {g.unit.index: g for g in gradients}
        self._device = device
        self._bucket_numel = bucket_numel
        self._order = [g.unit.index for g in reversed(gradients)]
        self._expected = {g.unit.index: len(g.unit.parameters) for g in gradients}
        self._arrived = dict.fromkeys(self._by_unit, 0)
        self._finished: list[int] = []
        self._queue: deque[int] | None = None
        self._works: deque[tuple[int, Work]] = deque()
        self._ran: set[int] = set()
        self._learned = False
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
        return sorted(self._ran | set(self.unreduced()))

    def unreduced(self) -> list[int]:
        """Units with gradients that no reduction has taken."""
        return [index for index, g in self._by_unit.items() if g.has_unreduced]

    def observed(self) -> list[int] | None:
        """This rank's order of completion, until an order has been learned."""
        return None if self._learned or not self._finished else self._finished

    def learn(self, order: Sequence[int]) -> None:
        """Adopt the agreed order (rank 0's); units not in it go to the end."""
        self._order = [*order, *(i for i in self._order if i not in order)]
        self._learned = True

    def begin(self, units: set[int]) -> None:
        """Start a reducing pass over ``units`` (those that any rank has to consider); the same set on every rank."""
        self._queue = deque(index for index in self._order if index in units)
        self._arrived = dict.fromkeys(self._by_unit, 0)
        self._finished = []
        self._advance()

    def arrived(self, index: int) -> bool:
        """Count one gradient of a unit; True when it was the last one expected in this pass."""
        self._arrived[index] += 1
        last = self._arrived[index] == self._expected[index]
        if last and index not in self._finished:
            self._finished.append(index)
            self._advance()
        return last

    def finish(self) -> None:
        """End the pass: reduce what is left, in order, and wait for every reduction."""
        if self._queue is None:
            return
        for index, count in self._arrived.items():
            if count and self._expected[index] != count:
                self._expected[index] = count
                self._finished.append(index)
        while self._queue:
            self._start(self._queue.popleft())
        self._drain()
        self._queue = None
        self._ran.clear()

    def reduce_now(self, units: set[int]) -> None:
        """Reduce ``units`` outside a pass (late gradients); the same set on every rank."""
        for index in self._order:
            if index in units:
                self._start(index)
        self._drain()

    def clear(self) -> None:
        """Forget all gradients."""
        self._ran.clear()
        for gradients in self._by_unit.values():
            gradients.clear()

    def _advance(self) -> None:
        while self._queue and self._due(self._queue[0]):
            self._start(self._queue.popleft())

    def _due(self, index: int) -> bool:
        if self._arrived[index] >= self._expected[index]:
            return True
        return index not in self._ran and not self._by_unit[index].has_unreduced

    def _start(self, index: int) -> None:
        gradients = self._by_unit[index]
        self._works.append((gradients.unit.layout.numel, gradients.start_reduce(self.step, self._device)))
        while len(self._works) > _IN_FLIGHT or sum(numel for numel, _ in self._works) > self._bucket_numel:
            self._works.popleft()[1].wait()

    def _drain(self) -> None:
        while self._works:
            self._works.popleft()[1].wait()
