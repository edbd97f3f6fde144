"""Track which modules run, to know when a unit's parameters are no longer needed."""

from __future__ import annotations

from typing import NamedTuple

from .unit import Unit


class RunningCall(NamedTuple):
    """A module's forward that has begun: whether it is part of a pass, and the exception handled when it began."""

    in_pass: bool
    handled: BaseException | None


class ModuleCalls:
    """The running calls of modules, and for each unit the modules that have not run in this pass yet.

    The modules of a unit are its members and its callers (`add_caller`): modules whose submodules return parameters of
    the unit.

    Attributes:
        outermost: name of the module whose call is the forward pass, None between forward passes.
        in_backward: a backward pass is running.
        paused: the hooks ignore module calls (`Runtime.pause`).
    """

    def __init__(self) -> None:
        self.outermost: str | None = None
        self.in_backward = False
        self.paused = False
        self._stacks: list[list[RunningCall]] = []
        self._depth: dict[int, int] = {}
        self._not_run: dict[int, set[str]] = {}
        self._callers: dict[int, set[str]] = {}

    def new_stack(self) -> list[RunningCall]:
        """Return a new, empty stack in which the caller keeps the running calls of one module; `forget_calls` empties
        it."""
        stack: list[RunningCall] = []
        self._stacks.append(stack)
        return stack

    def begin_call(self, unit: Unit) -> None:
        """Count one more running call of a module that uses ``unit``."""
        self._depth[unit.index] = self._depth.get(unit.index, 0) + 1

    def end_call(self, unit: Unit, module: str) -> None:
        """Count one fewer running call of a module that uses ``unit``, and record that the module, which is called
        ``module``, has run in this pass."""
        self._depth[unit.index] = max(self._depth.get(unit.index, 0) - 1, 0)
        self.note_run(unit, module)

    def note_run(self, unit: Unit, module: str) -> None:
        """Record that the module named ``module`` has run in this pass and needs ``unit`` no more."""
        self._still_to_run(unit).discard(module)

    def add_caller(self, unit: Unit, module: str) -> None:
        """Make `is_done` of ``unit`` wait for the module named ``module`` too, in this pass and in later ones."""
        self._callers.setdefault(unit.index, set()).add(module)
        self._still_to_run(unit).add(module)

    def is_running(self, unit: Unit) -> bool:
        """Return whether a module that uses ``unit`` is running."""
        return self._depth.get(unit.index, 0) > 0

    def is_done(self, unit: Unit) -> bool:
        """Return whether all modules of ``unit`` have run in this pass, and none is running."""
        return not self.is_running(unit) and not self._still_to_run(unit)

    def restart(self) -> None:
        """Begin a pass, in which no module has run yet."""
        self._not_run.clear()
        self._depth.clear()

    def forget_calls(self) -> None:
        """Forget the running pass and every running call, also in the stacks of `new_stack`: after a failure, as an
        exception may have skipped the forward hooks."""
        self.outermost = None
        self.in_backward = False
        self.restart()
        for stack in self._stacks:
            stack.clear()

    def _still_to_run(self, unit: Unit) -> set[str]:
        """Return the set of the names of the unit's modules that have not run in this pass; a caller removes those that
        have run."""
        found = self._not_run.get(unit.index)
        if found is None:
            found = self._not_run[unit.index] = {*unit.plan.members, *self._callers.get(unit.index, ())}
        return found
