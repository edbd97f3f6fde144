"""Count the gradients that each unit is expected to get in a backward pass."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from .gradients import UnitGradients
from .unit_edits import without_torch_function

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class ExpectedGradients:
    """Counts the gradients of a pass, and tells when a unit has all that it is expected to get. Units are named by
    their index, parameters by their index in the unit.

    Where parameters are sharded (stage 3), a unit is expected to get as many as in the last pass that reached it, so
    that it need not stay gathered until the end of the pass. At lower stages it is expected to get one for each
    parameter that requires a gradient now, plus the largest number of repeats that nested backward passes (reentrant
    activation checkpointing) have given it so far; missing ones are waited for until the end of the pass.

    Gradients that come after the expected ones are late, and are reduced after the next message among ranks. Where the
    user sees the averages right after backward (stage 0), none may be late: there units whose modules did not run are
    waited for too, and all units in the first pass.

    ``gradients``: the gradients of all trained units, by unit index.

    Attributes:
        may_be_late: gradients may come after the expected ones.
    """

    def __init__(self, gradients: Mapping[int, UnitGradients]) -> None:
        self.may_be_late = not any(g.is_shown for g in gradients.values())
        self._learns = any(g.unit.releasable for g in gradients.values())
        self._gradients = gradients
        self._count = {index: len(g.unit.parameters) for index, g in gradients.items()}
        self._arrived = dict.fromkeys(gradients, 0)
        self._numbers: dict[int, set[int]] = {index: set() for index in gradients}
        self._repeats = dict.fromkeys(gradients, 0)
        self._incomplete: set[int] = set()
        self._first = True

    @without_torch_function
    def begin(self) -> None:
        """Begin a pass, in which no gradient has arrived yet; below stage 3, count the parameters that require
        gradients now."""
        self._arrived = dict.fromkeys(self._gradients, 0)
        if self._learns:
            return
        self._numbers = {index: set() for index in self._gradients}
        for index in self._incomplete:
            required = sum(map(_REQUIRES_GRAD, self._gradients[index].unit.parameters))
            self._count[index] = required + self._repeats[index]

    def arrived(self, index: int, number: int) -> bool:
        """Count the gradient of parameter ``number`` of unit ``index``; return whether it was the last one that the
        unit is expected to get. False for a late one, too."""
        self._arrived[index] += 1
        if not self._learns:
            self._numbers[index].add(number)
        return self._arrived[index] == self._count[index]

    def has_all_expected(self, index: int) -> bool:
        """Return whether the unit ``index`` has got all its expected gradients in this pass; False in the first pass if
        none may be late."""
        return self._arrived[index] >= self._count[index] and (self.may_be_late or not self._first)

    def end(self) -> Iterator[int]:
        """End the pass: yield the indices of the units that got gradients, but another number of them than expected.

        At stage 3 the next passes expect the new number. The pass ends while the caller iterates, so it must iterate to
        the end.
        """
        self._first = False
        for index, count in self._arrived.items():
            if not self._learns:
                self._note_required(index, count)
            if count and count != self._count[index]:
                if self._learns:
                    self._count[index] = count
                yield index

    def reached(self) -> Iterator[int]:
        """Yield the indices of the units that got gradients in this pass."""
        return (index for index, count in self._arrived.items() if count)

    def _note_required(self, index: int, count: int) -> None:
        """Learn, below stage 3, how many of the ``count`` gradients that the unit ``index`` got in this pass were
        repeats, and whether `begin` has to count its parameters that require gradients again."""
        distinct = len(self._numbers[index])
        repeats = max(self._repeats[index], count - distinct)
        if distinct < len(self._gradients[index].unit.parameters) or repeats > self._repeats[index]:
            self._incomplete.add(index)
        else:
            self._incomplete.discard(index)
        self._repeats[index] = repeats
