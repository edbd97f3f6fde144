"""The engine's hook on a parameter's gradient, which runs after the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Report = Callable[["GradientHook"], None]


class GradientHook:
    """Calls ``report`` with itself when autograd has finished the gradient of ``parameter`` and the user's hooks have
    run.

    torch runs post-accumulate-grad hooks in the order of their registration, and the engine takes ``p.grad`` away. So
    this hook moves to the end when it finds hooks of the user's behind it. In that pass they still run after it:
    ``user_hooks_follow`` is True then, and the gradient has to stay in ``p.grad`` until the next one is ready or the
    pass ends.

    ``report`` must not hold a strong reference to the parameter or its owners: torch keeps these hooks where the
    garbage collector does not look, so model, shards and optimizer state would stay for the rest of the process.

    Attributes:
        user_hooks_follow: hooks of the user's run after this one in the present pass.
    """

    def __init__(self, parameter: nn.Parameter, report: Report) -> None:
        self.user_hooks_follow = False
        self._report = report
        self._seen: torch.Tensor | None = None
        self._version = 0
        self._first: RemovableHandle | None = None
        self._handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
        if len(self._hooks()) > 1:
            self._enclose_user_hooks(parameter)

    def __call__(self, parameter: torch.Tensor) -> None:
        """Set `user_hooks_follow` and call ``report``; autograd calls this after it has added a gradient to
        ``parameter.grad``. If hooks of the user's follow, also move this hook behind them for the next passes."""
        hooks = self._hooks()
        self.user_hooks_follow = len(hooks) > 1 and next(reversed(hooks)) != self._handle.id
        if self.user_hooks_follow:
            self._remember_gradient(parameter)
            self._enclose_user_hooks(parameter)
        self._report(self)

    def was_changed(self, gradient: torch.Tensor | None) -> bool:
        """Return whether the user's hooks have replaced or written autograd's gradient; False if none has run.
        ``gradient``: what ``.grad`` is now. Forgets autograd's gradient, so a second call returns False."""
        seen, self._seen = self._seen, None
        return seen is not None and (gradient is not seen or gradient._version != self._version)

    def remove(self) -> None:
        """Remove this hook, and the one that `_enclose_user_hooks` put before the user's."""
        self._handle.remove()
        if self._first is not None:
            self._first.remove()

    def _hooks(self) -> dict[int, Any]:
        """Return the parameter's post-accumulate-grad hooks by handle id, in their order; empty if it is gone."""
        hooks: dict[int, Any] | None = self._handle.hooks_dict_ref()
        return hooks if hooks is not None else {}

    def _enclose_user_hooks(self, parameter: torch.Tensor) -> None:
        """Make this hook the last of the parameter's post-accumulate-grad hooks, and `_remember_gradient` the first."""
        if self._first is None:
            first = parameter.register_post_accumulate_grad_hook(self._remember_gradient)  # type: ignore[no-untyped-call]
            self._first = first
        hooks = self._hooks()
        ends = (self._first.id, self._handle.id)
        for key in [self._first.id, *(key for key in hooks if key not in ends), self._handle.id]:
            hooks[key] = hooks.pop(key)

    def _remember_gradient(self, parameter: torch.Tensor) -> None:
        """Keep autograd's gradient and its version for `was_changed`, before the user's hooks see it."""
        self._seen = parameter.grad
        self._version = 0 if parameter.grad is None else parameter.grad._version
