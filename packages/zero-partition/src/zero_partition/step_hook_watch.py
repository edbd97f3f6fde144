"""Refuse uses of the model's parameters in the optimizer's step hooks that would have no effect or read old values.

[Note: the model's parameters in step hooks] In step hooks the optimizer works on the tensors of the param groups: these
have the gradients, and the new weights reach the model only after the hooks. Code that reads ``p.grad`` of the model
would find None, code that reads its weights after the update would find the old ones, and its writes would be
overwritten. So while such hooks of the user's run, the model's parameters have a subclass of their class that refuses
these uses by name. Released parameters have one already (released.py), and their uses are checked here too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .errors import PartitionError
from .gradient_watch import is_user_access
from .gradients import UnitGradients
from .guarded_tensors import written_by
from .host_facts import exchange_classes
from .ownership import find_owner
from .released import released_like, report_gradient_access
from .torch_calls import FACTS, SHAPES, attribute_of, name_of, reads_values
from .unit import Unit

_PLAIN = "_zero_class_outside_step_hooks"
_INSTEAD = (
    "Use the tensors of optimizer.param_groups there, which stand at the same places, or do it before or after "
    "engine.step()."
)


class StepHookWatch:
    """Refuses uses of the parameters of ``units``, while step hooks run, from `begin` to `end`.

    ``gradients``: those of trained units, by unit index.
    """

    def __init__(self, units: Sequence[Unit], gradients: Mapping[int, UnitGradients]) -> None:
        self._parameters = [parameter for unit in units for parameter in unit.parameters]
        self._places = {id(p): (unit, number) for unit in units for number, p in enumerate(unit.parameters)}
        self._gradients = gradients
        self._updated: bool | None = None

    @property
    def is_on(self) -> bool:
        """True while the user's step hooks run."""
        return self._updated is not None

    def begin(self, *, updated: bool) -> None:
        """Start refusing uses of the model's parameters, as the user's step hooks are about to run. ``updated``: they
        are post-hooks, which run after the optimizer's arithmetic."""
        self._updated = updated
        exchange_classes(self._parameters, _hooked_class)

    def end(self) -> None:
        """Stop refusing uses and give the parameters their own classes back; do nothing if `begin` was not called."""
        if self.is_on:
            self._updated = None
            exchange_classes(self._parameters, _outside_class)

    def gradient_used(self, parameter: nn.Parameter) -> None:
        """Raise `PartitionError` if user code uses ``parameter.grad`` while the optimizer's own tensor has the
        gradient. Do nothing if the parameter has no gradient."""
        unit, number = self._places[id(parameter)]
        gradients = self._gradients.get(unit.index)
        if gradients is not None and gradients.touched[number] and is_user_access():
            self._refuse_use(parameter, "p.grad", "the optimizer has the gradient")

    def values_used(self, parameter: nn.Parameter, call: str, *, writes: bool) -> None:
        """Raise `PartitionError` if the torch function named ``call`` would read old weights of ``parameter``, or write
        weights that the step would overwrite (``writes``).

        Does nothing for a frozen parameter, nor after the arithmetic if forward reads the memory that the optimizer
        updates.
        """
        unit, _ = self._places[id(parameter)]
        if not unit.plan.trainable or (self._updated and unit.master is unit.flat):
            return
        if writes:
            self._refuse_use(parameter, f"{call} would write", "the step would not know of it")
        if self._updated:
            self._refuse_use(parameter, f"{call} would read", "the model gets the new weights when the hooks are done")

    def _refuse_use(self, parameter: nn.Parameter, use: str, why: str) -> NoReturn:
        """Raise `PartitionError` with the message "``use`` of the model's parameter ... in a step hook of the
        optimizer: ``why``"."""
        unit, number = self._places[id(parameter)]
        raise PartitionError(
            f"{use} of the model's parameter '{unit.names[number]}' in a step hook of the optimizer: {why}. {_INSTEAD}"
        )


@functools.cache
def _outside_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of class ``kind`` has once step hooks are done; a released parameter stays
    released."""
    return released_like(kind, getattr(kind, _PLAIN)) if hasattr(kind, _PLAIN) else kind


@functools.cache
def _hooked_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of class ``kind`` has in step hooks: a subclass whose torch functions
    `StepHookWatch` checks; ``kind`` itself if it has a ``__torch_function__`` already, which makes the same checks."""
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return kind
    body = {
        "__torch_function__": classmethod(_call_checked),
        "data": property(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
        "detach": torch.Tensor.detach,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _PLAIN: kind,
    }
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(kind.__name__, (kind,), body)
    return made


def _call_checked(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Check the uses of parameters by torch function ``func``, then run it and return its result. The
    ``__torch_function__`` of parameters in step hooks.

    Raises `PartitionError` for a use that the parameter's owner refuses.
    """
    keywords, attribute, call = kwargs or {}, attribute_of(func), name_of(func)
    report_gradient_access(func, args)
    if _uses_values(attribute, call, args):
        written = {id(leaf) for leaf in written_by(call, args, keywords)}
        for leaf in tree_leaves((args, keywords)):
            if (owner := find_owner(leaf)) is not None:
                owner.values_used(leaf, attribute or call, writes=attribute == "data" or id(leaf) in written)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **keywords)


def _uses_values(attribute: str, call: str, args: tuple[Any, ...]) -> bool:
    """Return whether a torch function reads or writes values, not only facts such as the shape.

    ``call``: its name. ``attribute``: the tensor attribute that it reads or sets, "" for none. ``args``: its arguments.
    """
    if call in ("__get__", "__set__"):
        return attribute == "data" or reads_values(attribute, args[0])
    return call not in FACTS and call not in SHAPES
