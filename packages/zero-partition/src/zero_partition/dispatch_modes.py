"""The engine's own tensor operations are not the user's: dispatch modes of the user's do not see them.

[Note: stepping out of dispatch modes] A `TorchDispatchMode` around forward or backward sees every operation, also those
of the engine's hooks. Selective activation checkpointing keeps the results of a forward by their order and gives them
out again in the recomputation, so an operation of a gather would shift them. So the calls by which torch reaches the
engine inside passes are made outside such modes; hooks ask `any_modes` first, which costs next to nothing. Two kinds
stay. torch's infrastructure modes (fake, functional and proxy tensors) say what a tensor is. The other modes of torch
itself watch communication, memory or streams, of which the engine's are a part; those of `torch.utils.checkpoint` are
the exception, which they have to be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
innermost_transform: Callable[[], Any] = peek_interpreter_stack
"""The transform of torch.func (grad, jvp, vmap, …) that runs around the caller, None for none."""
any_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
REPLAYING = "torch.utils.checkpoint"


def outside(call: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Return ``call(*args, **kwargs)``, whose tensor operations no dispatch mode of the user's sees or changes."""
    left = _leave()
    try:
        return call(*args, **kwargs)
    finally:
        _enter(left)


def outside_modes(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``call``, always `outside`."""

    @functools.wraps(call)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return outside(call, *args, **kwargs) if any_modes() else call(*args, **kwargs)

    return wrapped


def outside_transforms(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``call``, whose tensors no transform of torch.func that runs around it wraps: they are the engine's own."""

    @functools.wraps(call)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if innermost_transform() is None:
            return call(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return call(*args, **kwargs)

    return wrapped


def _leave() -> list[Any]:
    """Take all modes but those of the infrastructure off the stack, innermost first, and put back those that stay."""
    taken: list[Any] = []
    while (mode := _get_current_dispatch_mode()) is not None and not mode.is_infra_mode():
        taken.append(_pop_mode())
    for mode in reversed(taken):
        if _stays(mode):
            _push_mode(mode)
    return taken


def _enter(taken: list[Any]) -> None:
    """Have the stack that `_leave` found."""
    for mode in taken:
        if _stays(mode):
            _pop_mode()
    for mode in reversed(taken):
        _push_mode(mode)


def _stays(mode: Any) -> bool:
    module = type(mode).__module__
    return module.partition(".")[0] == "torch" and module != REPLAYING
