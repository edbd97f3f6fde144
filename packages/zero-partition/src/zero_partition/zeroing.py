"""Make `zero_grad` of the user's optimizer and modules also discard the gradients that the engine holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class Discard(Protocol):
    """A function that discards gradients that the engine holds."""

    def __call__(self, *, set_to_none: bool) -> None:
        """Discard the gradients, or with ``set_to_none`` false make them zeros."""


class ZeroGrad:
    """Replaces `zero_grad` of ``owner``, an optimizer or a module, while an engine holds its parameters' gradients.

    It is in the object's own ``__dict__``, as torch's schedulers do with ``optimizer.step``; no class is changed.
    Copies and pickles of the object have the method of their class. ``discard``: called before the object's own method.
    This object holds that method, and with it ``owner``.
    """

    def __init__(self, owner: Any, discard: Discard) -> None:
        self._owner = weakref.ref(owner)
        self._own: Callable[..., Any] = owner.zero_grad
        self._before = owner.__dict__.get("zero_grad")
        self._discard = discard
        owner.__dict__["zero_grad"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Discard the engine's gradients, or zero them if ``set_to_none`` (the first argument) is false; then call the
        object's own `zero_grad` with the same arguments and return its result."""
        self._discard(set_to_none=bool(args[0] if args else kwargs.get("set_to_none", True)))
        return self._own(*args, **kwargs)

    def remove(self) -> None:
        """Restore the object's own `zero_grad`. Do nothing if something else has replaced this one, or the object is
        gone."""
        owner = self._owner()
        if owner is None or owner.__dict__.get("zero_grad") is not self:
            return
        if self._before is None:
            del owner.__dict__["zero_grad"]
        else:
            owner.__dict__["zero_grad"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes: the `zero_grad` of the pickled object's class."""
        return getattr, (self._owner(), "zero_grad")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the `zero_grad` of the copied object's class, bound to the copy."""
        copied = memo[id(self._owner())]
        return getattr(copied, "zero_grad")  # noqa: B009 - the copy's class has it; its __dict__ is empty still


def watch_modules(model: nn.Module, discard: Callable[..., None]) -> list[ZeroGrad]:
    """Make `zero_grad` of every module of ``model`` that has parameters call ``discard(parameters, set_to_none=…)``
    first. Return the replacements, whose `remove` restores the methods.

    ``parameters``: the module's; None for the model itself, meaning all.
    """

    def discard_for(module: nn.Module) -> Discard:
        """Return a function that discards the gradients of the parameters of ``module``, by the outer ``discard``. It
        refers weakly to ``module``, but strongly to ``model``."""
        reference = weakref.ref(module)

        def discard_of_module(*, set_to_none: bool) -> None:
            """Discard the gradients of the module's parameters; of all parameters if the module is the model itself, or
            gone."""
            found = reference()
            whole = found is model
            discard(None if found is None or whole else found.parameters(), set_to_none=set_to_none)

        return discard_of_module

    holders = (module for module in model.modules() if any(True for _ in module.parameters()))
    return [ZeroGrad(module, discard_for(module)) for module in holders]
