"""What user code does to ``.grad`` while the engine holds the gradients (stages 1 to 3).

[Note: gradients that the engine holds] Between backward and step ``p.grad`` is None although there is a gradient. Code
that reads it and goes on would do nothing in silence. For that time a parameter has a subclass of its own class, whose
``__torch_function__`` sees ``p.grad``: torch's clipping functions are refused, and ``p.grad = None`` forgets the
gradient, as it does in plain torch. Released parameters have such a class already (released.py) and report here too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .errors import PartitionError
from .gradients import UnitGradients
from .released import released_like, report_gradient_access

_PLAIN = "_zero_plain_class"
_CLIPPING = "torch.nn.utils.clip_grad"


class GradientWatch:
    """Watches the parameters of ``gradients`` from `begin` to `end`; ``discard`` forgets those of some parameters."""

    def __init__(self, gradients: Sequence[UnitGradients], discard: Callable[[Sequence[nn.Parameter]], None]) -> None:
        self._gradients = [g for g in gradients if not g.is_shown]
        self._discard = discard
        self._active = False

    def begin(self) -> None:
        """Backward is over, and the engine holds what it gave."""
        self._active = True
        for gradients in self._gradients:
            _exchange(gradients.unit.parameters, _watching_class)

    def end(self) -> None:
        """A pass or a step begins: parameters have their own class again."""
        if not self._active:
            return
        self._active = False
        for gradients in self._gradients:
            _exchange(gradients.unit.parameters, _plain_class)

    def accessed(self, parameter: nn.Parameter, *, cancels: bool) -> None:
        """``p.grad`` is read, or with ``cancels`` set to None. Raises `PartitionError` when torch clips."""
        if not self._active or not any(g.is_reduced or g.has_unreduced for g in self._gradients):
            return
        if cancels:
            self._discard([parameter])
        elif _reader() == _CLIPPING:
            name = next(
                (
                    n
                    for g in self._gradients
                    for n, p in zip(g.unit.names, g.unit.parameters, strict=True)
                    if p is parameter
                ),
                "?",
            )
            raise PartitionError(
                f"torch.nn.utils.clip_grad_* found no gradient of parameter '{name}': from stage 1 on the engine holds "
                "them, averaged and sharded, so nothing would be clipped. Call engine.clip_grad_norm_(max_norm) "
                'instead, or set "gradient_clipping" in the configuration.'
            )


def _exchange(parameters: Sequence[nn.Parameter], other: Callable[[type[nn.Parameter]], type[nn.Parameter]]) -> None:
    """Give each parameter the class that ``other`` says for its own."""
    kinds = set(map(type, parameters))
    if len(kinds) == 1:
        kind = kinds.pop()
        if other(kind) is not kind:
            exchanged = other(kind)
            for parameter in parameters:
                parameter.__class__ = exchanged
        return
    for parameter in parameters:
        parameter.__class__ = other(type(parameter))


@functools.cache
def _plain_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """``kind`` without the report of ``grad``."""
    return released_like(kind, getattr(kind, _PLAIN)) if hasattr(kind, _PLAIN) else kind


@functools.cache
def _watching_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """A subclass of ``kind`` that reports ``grad``; ``kind`` itself where it has torch functions of its own, as those
    of released parameters and of this module."""
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return kind
    body = {
        "__torch_function__": classmethod(_call),
        "__deepcopy__": _copy_as_plain,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _PLAIN: kind,
    }
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(kind.__name__, (kind,), body)
    return made


def _call(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    report_gradient_access(func, args)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _copy_as_plain(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    watching, parameter.__class__ = type(parameter), getattr(type(parameter), _PLAIN)
    try:
        copied: nn.Parameter = parameter.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied
    finally:
        parameter.__class__ = watching


def _reader() -> str:
    """The module of the code that reads the gradient."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("zero_partition"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
