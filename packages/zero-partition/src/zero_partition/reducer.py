"""Decide when each unit's gradients are averaged, overlapped with backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from .errors import PartitionError
from .expected import ExpectedGradients
from .gradients import UnitGradients
from .ordered_reductions import OrderedReductions


class StartsReductions(Protocol):
    """Starts reductions and waits for them without a deadlock among gathers and reductions; `Interleaving` is one.

    A reduction is the reduce-scatter of one unit's gradients. "Outside a pass" means that it is not part of the order
    of a backward pass.
    """

    def start_next(self) -> None:
        """Start the next reduction of the pass, with the gradients that have arrived; first finish older ones if too
        many are in flight."""

    def reduce_scatter_now(self, units: Iterable[int], /) -> None:
        """Reduce-scatter the gradients of ``units`` (indices) outside a pass, and wait for every reduction in flight.

        Collective, the same units on every rank, in any order.
        """

    def start_now(self, units: Iterable[int], /) -> None:
        """Finish every reduction in flight, and start those of the gradients of ``units`` (indices) outside a pass; do
        not wait for them.

        Collective, the same units on every rank, in any order.
        """

    def finish_all(self) -> None:
        """Wait for every reduction in flight."""


class Reducer:
    """Decides when each unit's gradients are averaged (reduce-scattered).

    A unit is due when all the gradients that it is expected to get have arrived (expected.py), or when its modules did
    not run here: then it contributes zeros without waiting. Units that are not due by the end of the pass are reduced
    there. Late gradients, which arrive after their unit was reduced, are kept, announced at the next agreement of the
    ranks, and reduced then. Where the user sees the averages before that (stage 0), a unit waits for all gradients that
    can still come, whether its modules ran or not, and late gradients are refused (`settle_late`).

    Where passes are complete (every pass reduces every unit, see `OrderedReductions`), a unit whose modules ran waits
    for all its gradients or for the end of the pass, however many it had last time; late gradients are refused.

    ``gradients``: of the trained units. ``reductions``: their order. ``starts``: starts reductions and waits for them.

    Attributes:
        torn: the failure of a backward pass that left only a part of its gradients; None if there was none.
    """

    def __init__(
        self, gradients: Sequence[UnitGradients], reductions: OrderedReductions, starts: StartsReductions
    ) -> None:
        self._by_unit = {g.unit.index: g for g in gradients}
        self._reductions = reductions
        self._starts = starts
        self.reset()
        self.torn: str | None = None

    def reset(self) -> None:
        """Forget everything learned from passes: expected gradients, which modules ran, which gradients were late."""
        self._expected = ExpectedGradients(self._by_unit)
        self._ran: set[int] = set()
        self._late: list[int] = []

    @property
    def active(self) -> bool:
        """True while a reducing backward pass is running."""
        return self._reductions.active

    @property
    def started(self) -> int:
        """Number of reductions that the running pass, or the last one, has started."""
        return self._reductions.started

    def mark_ran(self, unit: int) -> None:
        """Note that modules of the unit with index ``unit`` run in a forward that may lead to gradients; do nothing for
        a frozen unit."""
        if unit in self._by_unit:
            self._ran.add(unit)

    def pending(self) -> list[int]:
        """Return the indices, ascending, of the units that this rank has to reduce in a pass that begins now.

        They are those whose modules ran or that have unreduced gradients; all units where no gradient may be late or
        passes are complete.
        """
        everything = self._reductions.complete or not self._expected.may_be_late
        return sorted(self._by_unit if everything else self._ran | set(self.unreduced()))

    def late(self) -> list[int]:
        """Return the indices of the units that still hold gradients which came too late for their reduction in the last
        pass."""
        return [index for index in self._late if self._by_unit[index].has_unreduced]

    def forget_late(self) -> None:
        """Forget which gradients were late, as a pass that does not reduce is about to add to them; the
        gradients stay."""
        self._late = []

    def unreduced(self) -> list[int]:
        """Return the indices of the units that hold gradients which no reduction has taken."""
        return [index for index, g in self._by_unit.items() if g.has_unreduced]

    def begin(self, units: Iterable[int]) -> None:
        """Begin a backward pass that reduces ``units`` (indices of all that are `pending` on any rank, the same set on
        every rank), and start the reductions that are due already."""
        self._expected.begin()
        self._reductions.begin(units)
        self._start_due()

    def arrived(self, index: int, number: int) -> bool:
        """Count one gradient that has arrived, and start the reductions that are due; return whether it was the last
        one that its unit is expected to get in this pass.

        ``index``: of the unit. ``number``: the parameter's index in the unit.
        """
        last = self._expected.arrived(index, number)
        ready = self._by_unit[index].has_all if self._reductions.complete else last
        if ready and not self._reductions.is_complete(index):
            self._reductions.note_complete(index)
            self._start_due()
        return last

    def start_rest(self) -> None:
        """Start the remaining reductions in the agreed order, as autograd has ended, and note which units got another
        number of gradients than expected. Do nothing if no reducing pass runs."""
        if not self.active:
            return
        if self._reductions.complete:
            for index in self._expected.reached():
                self._reductions.note_complete(index)
        for index in self._expected.end():
            self._reductions.note_late(index)
        self._reductions.note_end()
        while self._reductions.next_unit is not None:
            self._starts.start_next()

    def finish(self) -> None:
        """Wait for every reduction in flight and end the pass, if one runs. Units that then hold unreduced gradients
        are `late`."""
        self._starts.finish_all()
        if self.active:
            self._late = self.unreduced()
        self._reductions.close()
        self._ran.clear()

    def abandon(self) -> None:
        """End a pass that failed, without learning from it: wait for the reductions that were started, the same on all
        ranks."""
        self.finish()
        self._reductions.forget_observed()

    def settle_late(self) -> None:
        """Deal with late gradients at the end of a pass in which none may be late: where passes are complete, or the
        user sees the averages (stage 0). Do nothing in other passes.

        A single rank reduces them now, unless passes are complete; otherwise raises `PartitionError`, naming a
        parameter.
        """
        if self._expected.may_be_late and not self._reductions.complete:
            return
        late = self.unreduced()
        if not late:
            return
        gradients = self._by_unit[late[0]]
        if gradients.is_alone and not self._reductions.complete:
            self.reduce_scatter_now(late)
            return
        name = next(n for n, p in zip(gradients.unit.names, gradients.present, strict=True) if p)
        came = f"the gradient of '{name}' came after its unit's reduction had begun: "
        if self._reductions.complete:
            raise PartitionError(
                f"{came}the parameter is used outside the modules that ran, or backward passes are nested (reentrant "
                "activation checkpointing). Under deterministic.across_world_sizes a micro-batch's gradient has to be "
                "complete before it is summed. Use the parameter inside its module's forward, and non-reentrant "
                "activation checkpointing."
            )
        raise PartitionError(
            f"{came}nested backward passes (reentrant activation checkpointing) reached it more often than before, and "
            "at stage 0 .grad shows the average right after backward. Use checkpoint(..., use_reentrant=False). The "
            "weights were not changed."
        )

    def reduce_scatter_now(self, units: Iterable[int]) -> None:
        """Reduce-scatter the (late) gradients of ``units`` (indices) outside a pass, and wait. Collective: the same
        units on every rank."""
        self._starts.reduce_scatter_now(units)

    def start_now(self, units: Iterable[int]) -> None:
        """Start the reductions of the gradients of ``units`` (indices) outside a pass, once those in flight are
        finished; `finish` waits for them. Collective: the same units on every rank."""
        self._starts.start_now(units)

    def clear(self) -> None:
        """Drop the gradients of all units, and forget which modules ran, which gradients were late and that a pass
        failed. The learned numbers of expected gradients stay."""
        self.torn = None
        self._ran.clear()
        self._late = []
        for gradients in self._by_unit.values():
            gradients.clear()

    def _start_due(self) -> None:
        """Start reductions in the agreed order until the next one is not due yet; finish older ones if too many are in
        flight."""
        while (index := self._reductions.next_unit) is not None and self._is_due(index):
            self._starts.start_next()

    def _is_due(self, index: int) -> bool:
        """Return whether the reduction of the unit with index ``index`` is due: the unit has all its expected gradients
        (all that can come, where passes are complete), or its modules did not run here and need not be waited for."""
        if self._reductions.complete:
            return self._by_unit[index].has_all or self._is_idle(index)
        return self._expected.has_all_expected(index) or (self._expected.may_be_late and self._is_idle(index))

    def _is_idle(self, index: int) -> bool:
        """Return whether the modules of the unit with index ``index`` did not run on this rank and the unit holds no
        unreduced gradient."""
        return index not in self._ran and not self._by_unit[index].has_unreduced
