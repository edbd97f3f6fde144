"""Find accesses of user code to ``.grad`` while the engine holds the gradients.

[Note: gradients that the engine holds] Between backward and step ``p.grad`` is None although there is a gradient,
except at stage 0 after the accumulation's last backward. Code that reads it there would silently do nothing. For that
time a parameter has a subclass of its own class, whose ``__torch_function__`` sees ``p.grad``: reading it is refused,
and ``p.grad = None`` forgets the gradient, as in plain torch. Released parameters have such a class already
(released.py) and report here too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from .errors import PartitionError
from .gradients import UnitGradients
from .host_facts import exchange_classes
from .released import released_like, report_gradient_access

_PLAIN = "_zero_plain_class"
_CLIPPING = "torch.nn.utils.clip_grad"
OtherClass = Callable[[type[nn.Parameter]], type[nn.Parameter]]
_QUIET = ("torch.", "zero_")  # packages that read p.grad for reasons of their own, except _ACTING
_ACTING = ("torch.optim.",)
_ZERO_GRAD = ("torch.nn.modules.module", "zero_grad")


class GradientWatch:
    """Watches ``.grad`` of the parameters of ``gradients`` (of the trained units) from `begin` to `end`.

    `pause` and `resume` enclose a forward pass, which computes with parameters of their own class. ``discard``: forgets
    the gradients of the given parameters. ``alone``: by name, parameters that no optimizer has, so that their gradients
    are this rank's only; empty on a single rank.
    """

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        discard: Callable[[Sequence[nn.Parameter]], None],
        alone: Mapping[str, nn.Parameter],
    ) -> None:
        self._gradients = list(gradients)
        self._held = {id(p): (g, n) for g in self._gradients for n, p in enumerate(g.unit.parameters)}
        self._discard = discard
        self._alone = {id(p): (name, p) for name, p in alone.items()}
        self._alone_parameters = list(alone.values())
        self._watched: list[UnitGradients] = []
        self._parameters: dict[bool, list[nn.Parameter]] = {
            shown: [p for g in self._unshown_gradients(shown=shown) for p in g.unit.parameters]
            for shown in (False, True)
        }
        self._begun = self._shown = False

    def begin(self, *, shown: bool) -> None:
        """Watch the parameters whose gradients the engine holds, after a backward pass.

        ``shown``: averaged gradients are shown in ``.grad`` where they can be (stage 0); these are not watched.
        """
        self._begun, self._shown = True, shown
        self._watched = self._unshown_gradients(shown=shown)
        self._exchange_classes(_watching_class)

    def end(self) -> None:
        """Stop watching, before a backward pass or a step; `resume` does nothing until the next `begin`."""
        self._begun = False
        self.pause()

    def pause(self) -> None:
        """Give the parameters their own class again, so that nothing is watched until `resume` or `begin`."""
        self._exchange_classes(_plain_class)
        self._watched = []

    def resume(self, *, hidden: bool) -> None:
        """Watch again after a forward pass, if `begin` was called and `end` was not. ``hidden``: the pass has set to
        None the averages that ``.grad`` showed."""
        if self._begun:
            self.begin(shown=self._shown and not hidden)

    def accessed(self, parameter: nn.Parameter, *, cancels: bool) -> None:
        """Handle a read of ``parameter.grad``, just before it happens; with ``cancels`` handle an assignment of None,
        which discards the gradient.

        Raises `PartitionError`, which names the parameter, for a read by user code or torch's optimizers if the engine
        holds its gradient, and by torch's clipping also if only other parameters have one. For a parameter that no
        optimizer has, only clipping is refused. Other code of torch and this project may read. Does nothing where no
        gradient is held or nothing is watched.
        """
        if id(parameter) in self._alone:
            if self._begun and not cancels:
                self._refuse_to_clip_alone(parameter)
            return
        if id(parameter) not in self._held or not any(g.is_reduced or g.has_unreduced for g in self._watched):
            return  # nothing of its unit is trained, or nothing has a gradient
        if cancels:
            self._discard([parameter])
            return
        frame = _accessing_frame()
        module = str(frame.f_globals.get("__name__"))
        if module == _CLIPPING:
            raise PartitionError(
                f"torch.nn.utils.clip_grad_* found no gradient of parameter '{self._name_of(parameter)}': from stage 1 "
                "on, and inside an accumulation, the engine holds them, so nothing would be clipped. Call "
                'engine.clip_grad_norm_(max_norm) instead, or set "gradient_clipping" in the configuration.'
            )
        gradients, number = self._held[id(parameter)]
        if not gradients.touched[number]:
            return
        if not module.startswith(_QUIET) or module.startswith(_ACTING) or _is_unreplaced_zero_grad(frame):
            raise PartitionError(
                f"p.grad of parameter '{self._name_of(parameter)}' was read in {module}.{frame.f_code.co_name} and is "
                "not there: from stage 1 on, and inside an accumulation, the engine holds the gradients, averaged and "
                "sharded. Code that continues without them would change nothing. Read engine.full_grad(p), write "
                "engine.set_full_grad(p, value) or p.grad = value, clip with engine.clip_grad_norm_, step with "
                "engine.step and zero with engine.zero_grad. The weights were not changed."
            )

    def _refuse_to_clip_alone(self, parameter: nn.Parameter) -> None:
        """Raise `PartitionError` if torch's clipping reads the gradient of ``parameter``, which no optimizer has;
        do nothing for any other reader, or if there is no gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            if parameter.grad is None or _accessing_frame().f_globals.get("__name__") != _CLIPPING:
                return
        raise PartitionError(
            f"torch.nn.utils.clip_grad_* was given parameter '{self._alone[id(parameter)][0]}', which requires "
            "gradients but is in no param group: its gradient is this rank's alone, so ranks would clip differently. "
            "Call engine.clip_grad_norm_(max_norm), or requires_grad_(False) on it. Nothing was clipped."
        )

    def _exchange_classes(self, other: OtherClass) -> None:
        """Set the class of every watched parameter, and of every one that no optimizer has, to the one that ``other``
        returns for its present class."""
        if self._watched:
            exchange_classes(self._parameters[self._shown], other)
        if self._alone_parameters:
            exchange_classes(self._alone_parameters, other)

    def _unshown_gradients(self, *, shown: bool) -> list[UnitGradients]:
        """Return the gradients of the units whose averages ``.grad`` does not show. ``shown``: averages are shown where
        they can be (stage 0)."""
        return [g for g in self._gradients if not (shown and g.is_shown)]

    def _name_of(self, parameter: nn.Parameter) -> str:
        """Return the full name of ``parameter``, one of a trained unit's."""
        gradients, number = self._held[id(parameter)]
        return gradients.unit.names[number]


@functools.cache
def _plain_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class that a parameter of class ``kind`` has when it is not watched: the class from which
    `_watching_class` made ``kind``, in its released form if ``kind`` is one; ``kind`` itself if it is no watching
    class."""
    return released_like(kind, getattr(kind, _PLAIN)) if hasattr(kind, _PLAIN) else kind


@functools.cache
def _watching_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a subclass of ``kind`` that reports accesses to ``grad`` to the parameter's owner (the engine's
    `Partition`); ``kind`` itself if it has a ``__torch_function__`` of its own, as released parameters and the classes
    made here have."""
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return kind
    body = {
        "__torch_function__": classmethod(_torch_function),
        "__deepcopy__": _copy_as_plain,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _PLAIN: kind,
    }
    metaclass: Any = type(kind)
    made: type[nn.Parameter] = metaclass(kind.__name__, (kind,), body)
    return made


def _torch_function(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run torch function ``func``, after reporting it to the parameter's owner (the engine's `Partition`) if it
    accesses ``grad``, which the owner may refuse with an error: ``__torch_function__`` of the watching classes."""
    report_gradient_access(func, args)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _copy_as_plain(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return a deep copy of ``parameter`` that is of its own class, not watched: ``__deepcopy__`` of the watching
    classes."""
    watching, parameter.__class__ = type(parameter), getattr(type(parameter), _PLAIN)
    try:
        copied: nn.Parameter = parameter.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copied
    finally:
        parameter.__class__ = watching


def is_user_access() -> bool:
    """Return whether the code that accesses a ``grad`` now is the user's, or torch's clipping or optimizers.

    The code is the innermost caller outside this package; other code of torch and of this project does not count.
    """
    module = str(_accessing_frame().f_globals.get("__name__"))
    return not module.startswith(_QUIET) or module == _CLIPPING or module.startswith(_ACTING)


def _is_unreplaced_zero_grad(frame: FrameType) -> bool:
    """Return whether ``frame``, which accesses a gradient, is torch's `Module.zero_grad`, and was not called by the
    engine's replacement for it (zeroing.py), so that the engine's gradients would stay."""
    if (frame.f_globals.get("__name__"), frame.f_code.co_name) != _ZERO_GRAD:
        return False
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") != "zero_partition.zeroing":
        caller = caller.f_back
    return caller is None


def _accessing_frame() -> FrameType:
    """Return the innermost running frame outside this package: that of the code which accesses a gradient now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("zero_partition"):
        frame = frame.f_back
    return frame
