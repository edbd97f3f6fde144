"""The class that the tensors in an optimizer's param groups have outside its step.

[Note: what user code does to fragments] The param groups hold this rank's fragments, so what user code does to the
tensors that it finds there would act on a part of a parameter, on some ranks only, or on nothing: their ``.grad`` is
None while the engine holds the gradients, weights that forward reads lie elsewhere at stages 1 and 2 or with masters
of their own, and where a tier or another rank holds the values these are placeholders. So outside the optimizer's step
fragments have a class whose ``__torch_function__`` refuses by name what would not count. Reading values is what it is
in torch, as long as they are here. In the step fragments are plain parameters; before it, in the user's step hooks,
they have their gradients, and only what needs whole gradients is refused.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .errors import PartitionError
from .host_facts import exchange_classes
from .torch_calls import FACTS, VIEWS, attribute_of, name_of, writes

REFERENCE = "_zero_fragment"  # the one attribute that a fragment carries: its guard, and its parameter's name
RELEASED = "_zero_released_fragment"  # instead of it, when the engine is gone: the name
_OF_THE_GRAPH = frozenset(["register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"])
_CLIPPING = "torch.nn.utils.clip_grad"
_OPTIMIZER = "torch.optim.optimizer"


class Phase(enum.Enum):
    """Where the optimizer is."""

    IDLE = enum.auto()  # between steps: the engine holds the gradients
    HOOKS = enum.auto()  # the user's step hooks run: fragments that are here have their gradients
    STEP = enum.auto()  # the optimizer's own arithmetic


class OptimizerTensors:
    """Guards the tensors of ``optimizer``'s param groups; ``named``: each with its parameter's name.

    ``own_hook``: the handle of a step hook of the engine's own; other hooks of the same kind are the user's.
    ``values_here``: the tensors hold the values that the optimizer updates, at least in its step; ``stay``: between
    steps too. ``split``: other ranks may hold other parts. ``has_gradient``: whether the engine holds a gradient of a
    parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[nn.Parameter, str]],
        *,
        own_hook: RemovableHandle,
        values_here: bool,
        stay: bool,
        split: bool,
        has_gradient: Callable[[str], bool],
    ) -> None:
        self._optimizer = optimizer
        self._tensors = [tensor for tensor, _ in named]
        self._own_hook = own_hook
        self._values_here, self._stay, self._split = values_here, stay, split
        self._has_gradient = has_gradient
        self._phase = Phase.IDLE
        self._updated = False
        self._own_post_hook = optimizer.register_step_post_hook(self._note_updated)
        if (hooks := self._own_post_hook.hooks_dict_ref()) is not None:
            hooks.move_to_end(self._own_post_hook.id, last=False)  # the first one of all
        for tensor, name in named:
            tensor.__dict__[REFERENCE] = (self, name)
        self._close(Phase.IDLE)

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
        return bool(optimizers._global_optimizer_pre_hooks) or (hooks is not None and len(hooks) > 1)

    def step(self, begin: Callable[[], None], updated_elsewhere: Sequence[nn.Parameter] = ()) -> Exception | None:
        """Have the optimizer step, inside `opened`: the user's step pre-hooks, ``begin``, its arithmetic, the user's
        post-hooks. Return what one of these raised: the update itself is done then.

        ``updated_elsewhere``: empty tensors whose parameters other ranks update; pre-hooks find empty gradients.
        """
        self._updated = False
        if not self.is_hooked:
            begin()
            return self._step_inner()
        for tensor in updated_elsewhere:
            tensor.grad = torch.empty_like(tensor)
        self._close(Phase.HOOKS)

        def open_and_begin(*_: Any) -> None:
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

    def _step_inner(self) -> Exception | None:
        try:
            self._optimizer.step()
        except Exception as error:
            if not self._updated:
                raise
            return error
        return None

    def _note_updated(self, *_: Any) -> None:
        self._updated = True

    def release(self) -> None:
        """The engine is gone: the tensors are plain parameters for good."""
        self._own_post_hook.remove()
        exchange_classes(self._tensors, _plain)
        for tensor in self._tensors:
            _, tensor.__dict__[RELEASED] = tensor.__dict__.pop(REFERENCE)

    def used(self, name: str, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Torch function ``func`` gets the tensor of parameter ``name``, or one that shares its memory.

        Raises `PartitionError` where it would do something else than with the full parameter.
        """
        attribute, call = attribute_of(func), name_of(func)
        if attribute == "grad" and call == "__get__":
            self._gradient_read(name)
        elif attribute == "grad" and call == "__set__":
            if not self._in_hooks and (args[1] is not None or self._has_gradient(name)):
                self._refuse_gradient(name, "written")
        elif (call == "__set__" and attribute == "requires_grad") or call in _OF_THE_GRAPH:
            raise PartitionError(
                f"{attribute or call} of a tensor of optimizer.param_groups that belongs to parameter '{name}': it "
                "does nothing there, as the engine steps with fragments. Use the model's parameter instead."
            )
        elif self._writes(call, attribute, args, keywords):
            if not self._in_hooks:
                self._refuse_write(name, attribute or call)
        elif not self._readable and _needs_values(call, attribute):
            raise PartitionError(
                f"{call}() of a tensor of optimizer.param_groups that belongs to parameter '{name}': its values are "
                "not there, but on the tier or with the rank that updates them. Read engine.full_param(p)."
            )

    @property
    def _in_hooks(self) -> bool:
        return self._phase is Phase.HOOKS and self._values_here

    @property
    def _readable(self) -> bool:
        return self._values_here and (self._stay or self._phase is not Phase.IDLE)

    def _gradient_read(self, name: str) -> None:
        frame = _reader()
        module = frame.f_globals.get("__name__")
        if self._phase is Phase.STEP or module == _OPTIMIZER:  # zero_grad of torch, after the engine's
            return
        if self._in_hooks:
            if self._split and module == _CLIPPING and not _clips_elements(frame):
                self._refuse_gradient(name, "read")
        elif self._has_gradient(name):
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
            return attribute == "data"
        written = [keywords.get("out"), args[0] if args and writes(call) else None]
        return any(isinstance(leaf, (_Fragment, FragmentValues)) for leaf in tree_leaves(written))

    def _open(self, *_: Any) -> None:
        """The optimizer's arithmetic begins."""
        self._phase = Phase.STEP
        if self._values_here:
            exchange_classes(self._tensors, _plain)

    def _close(self, phase: Phase) -> None:
        self._phase = phase
        exchange_classes(self._tensors, _guarded)


def left_by_an_engine(tensor: torch.Tensor) -> str | None:
    """Return the name of the parameter that ``tensor`` was a fragment of in an engine that is gone; None for others."""
    return tensor.__dict__.get(RELEASED)


def _call(
    _class: type, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    keywords = kwargs or {}
    first: tuple[OptimizerTensors, str] | None = None
    for leaf in tree_leaves((args, keywords)):
        if isinstance(leaf, (_Fragment, FragmentValues)):
            reference = leaf.__dict__.get(REFERENCE)
            if reference is not None:
                first = first or reference
                reference[0].used(reference[1], func, args, keywords)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **keywords)
    is_alias = name_of(func) == "detach" or (name_of(func) == "__get__" and attribute_of(func) == "data")
    if is_alias and first is not None:
        result = result.as_subclass(FragmentValues)
        result.__dict__[REFERENCE] = first
    return result


def _copy(tensor: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    with torch._C.DisableTorchFunctionSubclass():
        memo[id(tensor)] = copied = nn.Parameter(tensor.data.clone(), tensor.requires_grad)
    return copied


def _reduce(tensor: nn.Parameter, protocol: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        plain = nn.Parameter(tensor.data, tensor.requires_grad)
    return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _Fragment(nn.Parameter):
    """A fragment outside the optimizer's step."""

    __torch_function__: ClassVar[Any] = classmethod(_call)
    __deepcopy__ = _copy
    __reduce_ex__ = _reduce


class FragmentValues(torch.Tensor):
    """The result of ``data`` and ``detach()`` of a fragment outside the optimizer's step: for reading only."""

    __torch_function__: ClassVar[Any] = classmethod(_call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).clone()


def _plain(kind: type) -> type:
    return nn.Parameter if kind is _Fragment else kind


def _guarded(kind: type) -> type:
    return _Fragment if kind is nn.Parameter else kind  # torch's fake tensors have a class of their own


def _reader() -> FrameType:
    """The code that reads a gradient."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("zero_partition"):
        frame = frame.f_back
    return frame


def _clips_elements(frame: FrameType | None) -> bool:
    """Return whether the clipping in ``frame`` is `clip_grad_value_`, which looks at elements one by one."""
    while frame is not None and frame.f_globals.get("__name__") == _CLIPPING:
        if frame.f_code.co_name == "clip_grad_value_":
            return True
        frame = frame.f_back
    return False


def _needs_values(call: str, attribute: str) -> bool:
    if call == "__get__":
        return attribute in VIEWS
    return call != "detach" and call not in FACTS
