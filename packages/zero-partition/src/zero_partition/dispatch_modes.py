"""Hide the engine's own tensor operations from dispatch modes of the user's.

[Note: stepping out of dispatch modes] A `TorchDispatchMode` around forward or backward sees every operation, also those
of the engine's hooks. Selective activation checkpointing keeps the results of a forward by their order and returns them
in the recomputation, so an operation of a gather would shift them. So the engine's hooks run outside such modes; they
check `any_modes` first, which costs next to nothing. Two kinds of modes stay active. torch's infrastructure modes
(fake, functional and proxy tensors) define what a tensor is. torch's other modes watch communication, memory or
streams, and the engine's count there; only those of `torch.utils.checkpoint` do not stay.
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
"""Return how many dispatch modes are active."""
CHECKPOINT_MODULE = "torch.utils.checkpoint"


def call_outside_modes(
    call: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """Return ``call(*args, **kwargs)``, run outside the user's dispatch modes: none of them sees or changes its tensor
    operations."""
    left = _pop_user_modes()
    try:
        return call(*args, **kwargs)
    finally:
        _restore_modes(left)


def outside_modes(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return ``call`` wrapped to run outside the user's dispatch modes, as `call_outside_modes` runs it; a
    decorator."""

    @functools.wraps(call)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Call ``call`` outside the user's dispatch modes, if any mode is active."""
        return call_outside_modes(call, *args, **kwargs) if any_modes() else call(*args, **kwargs)

    return wrapped


def outside_transforms(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return ``call`` wrapped to run outside transforms of torch.func (grad, vmap, …), which would wrap the engine's
    tensors; a decorator."""

    @functools.wraps(call)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Call ``call`` with torch.func's stack of transforms empty, if any transform runs."""
        if innermost_transform() is None:
            return call(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return call(*args, **kwargs)

    return wrapped


def _pop_user_modes() -> list[Any]:
    """Deactivate the user's modes inside the innermost infrastructure mode; modes outside of it stay.

    Return all modes inside of it, innermost first, also torch's own that stay active: for `_restore_modes`.
    """
    taken: list[Any] = []
    while (mode := _get_current_dispatch_mode()) is not None and not mode.is_infra_mode():
        taken.append(_pop_mode())
    for mode in reversed(taken):
        if _stays_active(mode):
            _push_mode(mode)
    return taken


def _restore_modes(taken: list[Any]) -> None:
    """Restore the stack of modes as it was before the `_pop_user_modes` that returned ``taken``."""
    for mode in taken:
        if _stays_active(mode):
            _pop_mode()
    for mode in reversed(taken):
        _push_mode(mode)


def _stays_active(mode: Any) -> bool:
    """Return whether ``mode`` is torch's own and not one of activation checkpointing."""
    module = type(mode).__module__
    return module.partition(".")[0] == "torch" and module != CHECKPOINT_MODULE
