"""The modules of a model that its micro-batches visit one after the other, and the units that each visit uses.

A visit is a call of a module whose units are gathered for all micro-batches together; see [Note: unit by unit] in
unit_by_unit.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .errors import PartitionError
from .hooks import ModuleHooks
from .unit import Unit
from .visits import Place

_LOOP = "the ordinary loop of engine(batch), engine.backward and engine.step"


class VisitedModules:
    """Finds the modules whose calls are visits: the outermost ones that use the units of all modules inside.

    A module that uses units of its own around modules with others is visited as one, with all of them, if these have at
    most half of the model's elements: embeddings with a class token, a head with a bias beside its projection.

    ``hooks``: know which units a module uses. ``units``: all units of ``model``.
    """

    def __init__(self, model: nn.Module, hooks: ModuleHooks, units: Sequence[Unit]) -> None:
        self._model = model
        self._hooks = hooks
        self._most = sum(unit.layout.numel for unit in units) // 2
        self._found: list[Place] = []

    def find(self) -> list[Place]:
        """Return the modules whose calls are visits, in the order of the model. Raises `PartitionError` for fewer than
        two, and if a larger module uses parameters of its own beside those of units inside it."""
        self._found = []
        self._collect("", self._model)
        if len(self._found) < 2:
            raise PartitionError(
                f"train_batch: the model has {'one module' if self._found else 'no module'} with sharded parameters to "
                f"go by, so there is no sequence of units. Use {_LOOP}."
            )
        return self._found

    def _collect(self, name: str, module: nn.Module) -> None:
        """Add to the list of found modules those that are visited among ``module``, whose name is ``name``, and the
        modules inside it. Raises `PartitionError` as `find` does for a larger module."""
        inside = f"{name}." if name else ""
        used = self._units_used_by(name)
        below = {
            index: unit
            for other in self._hooks.watches
            if other != name and other.startswith(inside)
            for index, unit in self._units_used_by(other).items()
        }
        own = [unit for unit in used.values() if unit.releasable]
        together = used | below
        is_one = bool(used) and below.keys() <= used.keys()
        if is_one or (own and sum(unit.layout.numel for unit in together.values()) <= self._most):
            compiled = module._compiled_call_impl
            call = module._call_impl if compiled is None else compiled
            self._found.append(Place(name, module, tuple(together.values()), call))
            return
        if own:
            parameter = next((n for n in own[0].names if n.rpartition(".")[0] == name), own[0].names[0])
            raise PartitionError(
                f"train_batch: module '{name or type(module).__name__}' uses parameter '{parameter}' in its own "
                "forward, around modules that have units of their own and most of the model's elements. Put the "
                f"parameter into a submodule, or use {_LOOP}."
            )
        for key, child in module.named_children():
            self._collect(f"{inside}{key}", child)

    def _units_used_by(self, name: str) -> dict[int, Unit]:
        """Return, by index, the units that the module called ``name`` uses itself, not only through modules
        inside it."""
        watch = self._hooks.watches.get(name)
        return {} if watch is None else {unit.index: unit for unit in watch.units}
