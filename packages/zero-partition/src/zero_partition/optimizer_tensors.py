"""The class that the tensors in an optimizer's param groups have outside its step.

[Note: what user code does to fragments] The param groups hold this rank's fragments, so what user code does to the
tensors that it finds there would act on a part of a parameter, on some ranks only, or on nothing: their ``.grad`` is
None while the engine holds the gradients, weights that forward reads lie elsewhere at stages 1 and 2 or with masters
of their own, and where a tier or another rank holds the values these are placeholders. So outside the optimizer's step
fragments have a class whose ``__torch_function__`` refuses by name what would not count. In the step fragments are
plain parameters; in the user's step hooks they have their gradients, and writes count.

[Note: a part in the place of the whole] Where other ranks may hold the rest of a parameter, a mean, an index or a
branch on ``(p > 1).any()`` would be another number on each rank. What works element by element is the same for a part
and for the whole; so that alone is taken, its results are guarded alike, and anything else is refused. The shape of a
part is the parameter's to whoever asks. Optimizer states are guarded so when somebody looks at them (`guard_states`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .errors import PartitionError
from .guarded_tensors import (
    REFERENCE,
    FragmentReference,
    FragmentTensor,
    FragmentValues,
    check_same_parameter,
    guard_of,
    why_not_elementwise,
    written_by,
)
from .host_facts import exchange_classes
from .step_hook_watch import StepHookWatch
from .torch_calls import FACTS, SHAPES, VIEWS, attribute_of, name_of

RELEASED = "_zero_released_fragment"  # instead of its reference, when the engine is gone: the parameter's name
_OF_THE_GRAPH = frozenset(["register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"])
_OPTIMIZER = "torch.optim.optimizer"


class Phase(enum.Enum):
    """Where the optimizer is."""

    IDLE = enum.auto()  # between steps: the engine holds the gradients
    HOOKS = enum.auto()  # the user's step hooks run: fragments that are here have their gradients
    STEP = enum.auto()  # the optimizer's own arithmetic


class WatchedStates(Protocol):
    """The optimizer's states, by tensor of its param groups."""

    def watch(self, read: Callable[[], None]) -> None:
        """Call ``read`` before states are looked at, until `unwatch`."""

    def unwatch(self) -> None:
        """Let states be looked at."""

    def show_all(self) -> Iterable[tuple[Any, Any]]:
        """List parameters whose states other ranks have as well, and return each tensor with its states, in memory that
        the optimizer has itself."""

    def entries(self) -> Iterable[tuple[Any, Any]]:
        """Each tensor with its states, in memory that the optimizer has itself."""


class OptimizerTensors:
    """Guards the tensors of ``optimizer``'s param groups and states, and in step hooks the ``model``'s parameters;
    ``named``: each tensor with its parameter's name and full shape.

    ``own_hook``: the handle of a step pre-hook of the engine's own; other hooks of the same kind are the user's.
    ``values_here``: the tensors hold the values that the optimizer updates, at least in its step; ``stay``: between
    steps too. ``split``: other ranks may hold other parts. ``has_gradient``: whether the engine holds a gradient of a
    parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[nn.Parameter, str, torch.Size]],
        states: WatchedStates,
        model: StepHookWatch,
        *,
        own_hook: RemovableHandle,
        values_here: bool,
        stay: bool,
        split: bool,
        has_gradient: Callable[[str], bool],
    ) -> None:
        self._optimizer = optimizer
        self._tensors = [tensor for tensor, _, _ in named]
        self._states = states
        self._model = model
        self._states_seen = False
        self._own_hook = own_hook
        self._values_here, self._stay, self.split = values_here, stay, split
        self._has_gradient = has_gradient
        self._phase = Phase.IDLE
        self._depth = 0  # of calls of step: one that is inherited and hooked is another inside
        self._updated = False
        self._elsewhere: Sequence[nn.Parameter] = ()
        self._own_hooks = [
            optimizer.register_step_pre_hook(self._note_entered),
            optimizer.register_step_post_hook(self._note_updated),
        ]
        if (hooks := self._own_hooks[1].hooks_dict_ref()) is not None:
            hooks.move_to_end(self._own_hooks[1].id, last=False)  # the first one of all
        for tensor, name, shape in named:
            tensor.__dict__[REFERENCE] = FragmentReference(self, name, shape, is_updated=True)
        self._close(Phase.IDLE)

    @property
    def is_on(self) -> bool:
        """Return whether tensors are guarded now."""
        return self._phase is not Phase.STEP

    def check_states(self) -> None:
        """Raise `PartitionError` for a state, set by user code, of another parameter or of all of one."""
        if not self._states_seen:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, kept in self._states.entries():
                reference = tensor.__dict__.get(REFERENCE) if isinstance(tensor, nn.Parameter) else None
                if reference is not None:
                    for kind, value in kept.items() if isinstance(kept, dict) else ():
                        _check_state(reference, tensor, kind, value)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the tensors are plain parameters, where their values are here."""
        self._open()
        try:
            yield
        finally:
            self._close(Phase.IDLE)

    @property
    def is_hooked(self) -> bool:
        """Return whether the user has hooks that run before the optimizer's arithmetic, its own or of all
        optimizers."""
        hooks = self._own_hook.hooks_dict_ref()
        return bool(optimizers._global_optimizer_pre_hooks) or (hooks is not None and len(hooks) > 2)

    def step(self, begin: Callable[[], None], updated_elsewhere: Sequence[nn.Parameter] = ()) -> Exception | None:
        """Have the optimizer step, inside `opened`: the user's step pre-hooks, ``begin``, its arithmetic, the user's
        post-hooks. Return what one of these raised: the update itself is done then.

        ``updated_elsewhere``: empty tensors whose parameters other ranks update; pre-hooks find empty gradients.
        """
        self._updated, self._depth, self._elsewhere = False, 0, updated_elsewhere
        if not self.is_hooked:
            begin()
            try:
                return self._step_inner()
            finally:
                self._forget_empty()
        for tensor in updated_elsewhere:
            tensor.grad = torch.empty_like(tensor)
        self._close(Phase.HOOKS)

        def open_and_begin(*_: Any) -> None:
            self.check_states()
            self._open()
            for tensor in updated_elsewhere:
                tensor.grad = None
            begin()

        opening = self._optimizer.register_step_pre_hook(open_and_begin)  # the last one of all
        try:
            return self._step_inner()
        finally:
            opening.remove()
            self._open()
            self._forget_empty()

    def _step_inner(self) -> Exception | None:
        try:
            self._optimizer.step()
        except Exception as error:
            if not self._updated:
                raise
            return error
        return None

    def _forget_empty(self) -> None:
        """Take the gradients away that hooks found of parameters which other ranks update."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in self._elsewhere:
                tensor.grad = None
        self._elsewhere = ()

    def _note_entered(self, *_: Any) -> None:
        self._depth += 1

    def _note_updated(self, *_: Any) -> None:
        self._updated = True
        self._depth -= 1
        hooks = self._own_hooks[1].hooks_dict_ref()
        others = hooks is not None and len(hooks) > 1
        if self._depth == 0 and self._phase is Phase.STEP and (others or optimizers._global_optimizer_post_hooks):
            for tensor in self._elsewhere:
                tensor.grad = torch.empty_like(tensor)
            self._close(Phase.HOOKS)

    def release(self) -> None:
        """The engine is gone: the tensors are plain parameters for good."""
        self._open()
        for hook in self._own_hooks:
            hook.remove()
        exchange_classes(self._tensors, _plain)
        for tensor in self._tensors:
            tensor.__dict__[RELEASED] = tensor.__dict__.pop(REFERENCE).name

    def used(self, reference: FragmentReference, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Torch function ``func`` gets a guarded tensor.

        Raises `PartitionError` where it would do something else than with the full parameter.
        """
        name, attribute, call = reference.name, attribute_of(func), name_of(func)
        if attribute == "grad" and call == "__get__":
            self._gradient_read(name)
        elif attribute == "grad" and call == "__set__":
            if not self._in_hooks and (args[1] is not None or self._has_gradient(name)):
                self._refuse_gradient(name, "written")
        elif (
            call == "__set__"
            and attribute == "data"
            and reference.is_updated
            and not isinstance(args[0], FragmentTensor)
        ):
            raise PartitionError(
                f".data of the gradient of parameter '{name}' was set in a step hook, which would not reach the "
                "optimizer. Write p.grad = value there, or p.grad.copy_(value)."
            )
        elif (call == "__set__" and attribute == "requires_grad") or call in _OF_THE_GRAPH:
            if isinstance(args[0], FragmentTensor):
                raise PartitionError(
                    f"{attribute or call} of a tensor of optimizer.param_groups that belongs to parameter '{name}': it "
                    "does nothing there, as the engine steps with fragments. Use the model's parameter instead."
                )
        elif self._writes(call, attribute, args, keywords):
            if not self._in_hooks:
                self._refuse_write(name, attribute or call)
        elif reference.is_updated and not self._readable and _needs_values(call, attribute):
            raise PartitionError(
                f"{call}() of a tensor of optimizer.param_groups that belongs to parameter '{name}': its values are "
                "not there, but on the tier or with the rank that updates them. Read engine.full_param(p)."
            )
        if self.split and (why := why_not_elementwise(reference, func, args, keywords)):
            raise PartitionError(
                f"{why}, of which optimizer.param_groups and optimizer.state have this rank's part of parameter "
                f"'{name}' alone: it would be another result on each rank. Use engine.full_param(p), "
                "engine.full_grad(p) and engine.full_state(p, name), which have all of it, and write by "
                "engine.gathered([p], modifier_rank=0), engine.set_full_grad and engine.set_full_state, outside "
                "engine.step(); clip with engine.clip_grad_norm_; or have an optimizer class of your own do it in its "
                f"step, which gets full parameters.{'' if self._updated else ' The weights were not changed.'}"
            )

    @property
    def _in_hooks(self) -> bool:
        return self._phase is Phase.HOOKS and self._values_here

    @property
    def _readable(self) -> bool:
        return self._values_here and (self._stay or self._phase is not Phase.IDLE)

    def _gradient_read(self, name: str) -> None:
        if not self._in_hooks and self._has_gradient(name) and _reader() != _OPTIMIZER:  # zero_grad, after the engine's
            self._refuse_gradient(name, "read")

    def _refuse_gradient(self, name: str, how: str) -> NoReturn:
        raise PartitionError(
            f".grad of a tensor of optimizer.param_groups that belongs to parameter '{name}' was {how}: the engine "
            "holds the gradients, averaged and sharded, and what is done to a fragment's would be lost or differ "
            "between ranks. Read engine.full_grad(p), write engine.set_full_grad(p, value) or p.grad = value of the "
            "model's parameter p, clip with engine.clip_grad_norm_, zero with engine.zero_grad. The weights were not "
            "changed."
        )

    def _refuse_write(self, name: str, how: str) -> NoReturn:
        hooks = ", or do it in optimizer.register_step_post_hook" if self._values_here else ""
        raise PartitionError(
            f"{how} would write a tensor of optimizer.param_groups that belongs to parameter '{name}': this rank's "
            "fragment of its master, which forward does not read. Write the model's parameter instead, inside "
            f"`with engine.gathered([p], modifier_rank=0)`{hooks}. Nothing was written."
        )

    @staticmethod
    def _writes(call: str, attribute: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        if call == "__set__":
            return attribute == "data" and isinstance(args[0], FragmentTensor)
        references = map(guard_of, written_by(call, args, keywords))
        return any(reference is not None and reference.is_updated for reference in references)

    def _open(self, *_: Any) -> None:
        """The optimizer's arithmetic begins."""
        self._phase = Phase.STEP
        self._model.end()
        if self._values_here:
            exchange_classes(self._tensors, _plain)
        self._states.unwatch()
        if self._states_seen:
            values = [one for one in self._state_values() if isinstance(one, FragmentValues)]
            for one in values:
                del one.__dict__[REFERENCE]
            exchange_classes(values, _unguarded)

    def _close(self, phase: Phase) -> None:
        self._phase = phase
        if phase is Phase.HOOKS:
            self._model.begin(updated=self._updated)
        else:
            self._model.end()
        exchange_classes(self._tensors, _guarded)
        self._states.watch(self._guard_states)
        if self._states_seen:
            self._guard_states()

    def _guard_states(self) -> None:
        """Guard the states that are like the tensors that they are of: somebody looks at them, or has."""
        if not self.split:
            return
        self._states_seen = True
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, kept in self._states.show_all():
                reference = tensor.__dict__.get(REFERENCE) if isinstance(tensor, nn.Parameter) else None
                if reference is None:
                    continue
                for value in tree_leaves(dict(kept) if isinstance(kept, dict) else kept):
                    if type(value) is torch.Tensor and value.dim() and value.is_same_size(tensor):
                        value.__class__ = FragmentValues
                        value.__dict__[REFERENCE] = dataclasses.replace(reference, is_updated=False)

    def _state_values(self) -> Iterator[Any]:
        for _, kept in self._states.entries():
            yield from tree_leaves(dict(kept) if isinstance(kept, dict) else kept)


def _check_state(reference: FragmentReference, tensor: torch.Tensor, kind: str, value: Any) -> None:
    for one in tree_leaves(value):
        check_same_parameter(reference.name, kind, one)
        if type(one) is torch.Tensor and one.dim() and one.shape == reference.shape and tensor.numel() != one.numel():
            raise PartitionError(
                f"optimizer.state of parameter '{reference.name}': '{kind}' was set to a tensor of its full shape "
                f"{tuple(reference.shape)}, and this rank has a part, {tensor.numel()} elements. Write "
                "engine.set_full_state(p, kind, value), or torch.zeros_like(p) of the tensor in optimizer.param_groups "
                "for the part. The weights were not changed."
            )


def left_by_an_engine(tensor: torch.Tensor) -> str | None:
    """Return the name of the parameter that ``tensor`` was a fragment of in an engine that is gone; None for others."""
    return tensor.__dict__.get(RELEASED)


def _plain(kind: type) -> type:
    return nn.Parameter if kind is FragmentTensor else kind


def _unguarded(_kind: type) -> type:
    return torch.Tensor


def _guarded(kind: type) -> type:
    return FragmentTensor if kind is nn.Parameter else kind  # torch's fake tensors have a class of their own


def _reader() -> str:
    """The module that reads a gradient."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("zero_partition"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _needs_values(call: str, attribute: str) -> bool:
    if call == "__get__":
        return attribute in VIEWS
    return call != "detach" and call not in FACTS and call not in SHAPES
