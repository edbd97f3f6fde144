"""Follow which modules run, to know when a unit's parameters are no longer needed."""

from __future__ import annotations

from typing import NamedTuple

from .unit import Unit


class RunningCall(NamedTuple):
    """A module's forward that has begun: whether it is part of a pass, and the exception that was being handled."""

    in_pass: bool
    handled: BaseException | None


class ModuleCalls:
    """The running calls of modules, and for each unit the modules that have not run in this pass yet.

    A unit's modules are its members, and those that `keep` names: modules whose submodules return parameters of it.

    Attributes:
        outermost: name of the module whose call is the forward pass, None between forward passes.
        in_backward: a backward pass is running.
        paused: calls of modules are not followed.
    """

    def __init__(self) -> None:
        self.outermost: str | None = None
        self.in_backward = False
        self.paused = False
        self._stacks: list[list[RunningCall]] = []
        self._depth: dict[int, int] = {}
        self._not_run: dict[int, set[str]] = {}
        self._keepers: dict[int, set[str]] = {}

    def stack(self) -> list[RunningCall]:
        """A new stack for the running calls of one module; `forget` empties it."""
        stack: list[RunningCall] = []
        self._stacks.append(stack)
        return stack

    def enter(self, unit: Unit) -> None:
        """A module that uses ``unit`` begins."""
        self._depth[unit.index] = self._depth.get(unit.index, 0) + 1

    def leave(self, unit: Unit, module: str) -> None:
        """A module that uses ``unit`` is done."""
        self._depth[unit.index] = max(self._depth.get(unit.index, 0) - 1, 0)
        self.note_run(unit, module)

    def note_run(self, unit: Unit, module: str) -> None:
        """``module`` has run, and with it what it needs of ``unit``."""
        self._still_to_run(unit).discard(module)

    def keep(self, unit: Unit, module: str) -> None:
        """Count ``module`` among those that have to run before ``unit`` is done."""
        self._keepers.setdefault(unit.index, set()).add(module)
        self._still_to_run(unit).add(module)

    def is_running(self, unit: Unit) -> bool:
        """Return whether a module that uses ``unit`` is running."""
        return self._depth.get(unit.index, 0) > 0

    def is_done(self, unit: Unit) -> bool:
        """Return whether all modules of ``unit`` have run in this pass, and none is running."""
        return not self.is_running(unit) and not self._still_to_run(unit)

    def restart(self) -> None:
        """A pass begins: no module has run in it yet."""
        self._not_run.clear()
        self._depth.clear()

    def forget(self) -> None:
        """No call is running any more: an exception may have skipped the hooks that say so."""
        self.outermost = None
        self.in_backward = False
        self.restart()
        for stack in self._stacks:
            stack.clear()

    def _still_to_run(self, unit: Unit) -> set[str]:
        found = self._not_run.get(unit.index)
        if found is None:
            found = self._not_run[unit.index] = {*unit.plan.members, *self._keepers.get(unit.index, ())}
        return found
