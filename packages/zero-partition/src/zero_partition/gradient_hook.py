"""The engine's hook on a parameter's gradient, which runs after the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Report = Callable[["GradientHook"], None]


class GradientHook:
    """Reports that autograd has finished a parameter's gradient, to ``report``.

    torch runs post-accumulate-grad hooks in the order of their registration, and the engine takes ``p.grad`` away. So
    this hook goes to the end when it meets hooks of the user's behind it. In that pass they run after it: ``goes_on``
    says so, and the gradient is theirs until the next one is ready or the pass ends.

    ``report`` must not lead back to the parameter: torch keeps these hooks where the garbage collector does not look.
    A strong reference to the parameter's owners would keep model, shards and optimizer state for the rest of the
    process.

    Attributes:
        goes_on: hooks of the user's still run in this pass.
    """

    def __init__(self, parameter: nn.Parameter, report: Report) -> None:
        self.goes_on = False
        self._report = report
        self._seen: torch.Tensor | None = None
        self._version = 0
        self._first: RemovableHandle | None = None
        self._handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
        if len(self._hooks()) > 1:
            self._stand_around(parameter)

    def __call__(self, parameter: torch.Tensor) -> None:
        """Autograd has added to ``parameter.grad``."""
        hooks = self._hooks()
        self.goes_on = len(hooks) > 1 and next(reversed(hooks)) != self._handle.id
        if self.goes_on:
            self._note(parameter)
            self._stand_around(parameter)
        self._report(self)

    def changed(self, gradient: torch.Tensor | None) -> bool:
        """Return True when the user's hooks made ``gradient`` of autograd's; forget autograd's."""
        seen, self._seen = self._seen, None
        return seen is not None and (gradient is not seen or gradient._version != self._version)

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        if self._first is not None:
            self._first.remove()

    def _hooks(self) -> dict[int, Any]:
        hooks: dict[int, Any] | None = self._handle.hooks_dict_ref()
        return hooks if hooks is not None else {}

    def _stand_around(self, parameter: torch.Tensor) -> None:
        """Be the last hook, and have `_note` be the first."""
        if self._first is None:
            self._first = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
        hooks = self._hooks()
        ends = (self._first.id, self._handle.id)
        for key in [self._first.id, *(key for key in hooks if key not in ends), self._handle.id]:
            hooks[key] = hooks.pop(key)

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen = parameter.grad
        self._version = 0 if parameter.grad is None else parameter.grad._version
