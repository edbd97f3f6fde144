"""Catch uses of released parameters that no hook reports: tied heads, functional use, other modules' weights.

A module is watched when its ``_parameters`` is a `WatchedParameters`. A releasable unit is one that may be released,
where parameters are sharded.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .hooks import eager
from .scripted import takes_hooks
from .unit import Unit

Parameters = dict[str, nn.Parameter | None]


class ParameterUse(Protocol):
    """The receiver of reports on the use of a module's parameters; `UnannouncedUse` is one."""

    def parameter_read(self, parameter: nn.Parameter, /) -> None:
        """Gather ``parameter`` if a pass runs. Called when code reads it from a module."""

    def refuse_pickle(self, parameters: Sequence[nn.Parameter], /) -> None:
        """Raise `ReleasedParameterError` if one of ``parameters`` is released, which the error names. Called before the
        module that owns them is pickled."""


class WatchedParameters(Parameters):
    """A module's ``_parameters`` that reports look-ups by name to ``use``, as ``module.weight`` makes one.

    Iteration (``named_parameters`` and the like) is not reported. Copies and pickles are plain dicts; pickling raises
    while one of the parameters is released. ``parameters``: the plain dict whose entries it takes over.
    """

    def __init__(self, parameters: Parameters, use: ParameterUse) -> None:
        super().__init__(parameters)
        self._use = use
        self._on_read = eager(use.parameter_read)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """Return the parameter ``name`` after reporting its use, which gathers it in a pass; None, unreported, where
        None is registered. Inside torch.compile a parameter that is present is not reported. Raises KeyError for an
        unknown name."""
        parameter = super().__getitem__(name)
        if parameter is not None and not (torch.compiler.is_compiling() and _is_present(parameter)):
            self._on_read(parameter)
        return parameter

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes: a plain dict. Raises `ReleasedParameterError` while one of the parameters is
        released."""
        self._use.refuse_pickle([p for p in self.values() if p is not None])
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameters:
        """Return a plain dict of deep copies by name, made with ``memo``.

        The look-ups are not reported to ``use``. Copying a parameter that is released gathers its values, which is
        collective outside a pass.
        """
        return copy.deepcopy(dict(self), memo)


def _is_present(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has its values and is no placeholder (which stands for a released one): placeholders
    have strides of zero only, and at least two elements.

    torch.compile can trace this, as it guards the strides of a graph's inputs.
    """
    return any(parameter.stride())


class Interception:
    """Gives every module that owns a parameter of a releasable unit, now or later, a `WatchedParameters`.

    ``use``: gets its reports. `remove` gives the modules plain dicts again. ``model``, ``units``: of the engine; it
    holds the modules weakly.
    """

    def __init__(self, model: nn.Module, units: list[Unit], use: ParameterUse) -> None:
        self._held = {id(p) for unit in units if unit.releasable for p in unit.parameters}
        self._use = use
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        for module in model.modules():
            if any(id(p) in self._held for p in module._parameters.values()):
                self._watch(module)
        reference = weakref.ref(self)

        def registered(module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
            """Watch ``module`` if ``parameter``, which was registered in it, belongs to a releasable unit: torch's hook
            on registrations."""
            watching = reference()
            if watching is not None and id(parameter) in watching._held:
                watching._watch(module)

        # removed by `remove` alone: garbage is collected anywhere, also while torch iterates over its hooks
        self._handle = register_module_parameter_registration_hook(registered)

    def remove(self) -> None:
        """Stop watching, and give the modules plain dicts again."""
        self._handle.remove()
        for module in self._modules:
            module.__dict__["_parameters"] = dict(module._parameters)
        self._modules.clear()

    def _watch(self, module: nn.Module) -> None:
        """Have look-ups of the parameters of ``module`` reported; do nothing if they are already, or if it is a
        torch.jit module, which takes no hooks."""
        if takes_hooks(module) and not isinstance(module._parameters, WatchedParameters):
            module.__dict__["_parameters"] = WatchedParameters(module._parameters, self._use)
            self._modules.add(module)
