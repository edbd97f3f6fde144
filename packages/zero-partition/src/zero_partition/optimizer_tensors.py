"""Guard the tensors in an optimizer's param groups against uses that would have no effect, or differ between ranks.

[Note: what user code does to fragments] The param groups hold this rank's fragments. User code that works on these
tensors would act on a part of a parameter, on some ranks only, or on nothing: their ``.grad`` is None while the engine
holds the gradients, weights that forward reads lie elsewhere at stages 1 and 2 or beside separate masters, and if a
tier or another rank holds the values, the tensors are placeholders. So outside the optimizer's step fragments have a
class whose ``__torch_function__`` refuses, by name, uses without an effect. In the step fragments are plain parameters;
in the user's step hooks they have their gradients, and writes take effect.

[Note: a part in the place of the whole] If other ranks may hold the rest of a parameter, a mean, an index or a branch
on ``(p > 1).any()`` would be another number on each rank. So only elementwise operations are allowed, which give the
same on a part as on the full parameter; their results are guarded too, and a fragment reports its parameter's full
shape. Optimizer states are guarded once code reads them (`OptimizerTensors._guard_states`).
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
from .torch_calls import attribute_of, name_of, needs_values

RELEASED = "_zero_released_fragment"  # attribute of a fragment of a destroyed engine: its parameter's name
_OF_THE_GRAPH = frozenset(["register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"])
_OPTIMIZER = "torch.optim.optimizer"


class Phase(enum.Enum):
    """The phase of the optimizer's step that runs now; it decides which uses of its tensors are refused.

    IDLE: between steps. HOOKS: the user's step hooks run. STEP: the optimizer's own arithmetic runs.
    """

    IDLE = enum.auto()  # between steps: the engine holds the gradients
    HOOKS = enum.auto()  # the user's step hooks run: fragments that are here have their gradients
    STEP = enum.auto()  # the optimizer's own arithmetic


class WatchedStates(Protocol):
    """The states that an optimizer itself holds (its ``state``), by tensor of its param groups; `OptimizerStates` is
    one."""

    def watch(self, read: Callable[[], None]) -> None:
        """Call ``read``, without arguments, just before code next reads the states, and again before the first read
        after a state dict was loaded or a new mapping was assigned, until `unwatch`. ``read`` replaces the function of
        an earlier call; an error that it raises reaches the code that reads."""

    def unwatch(self) -> None:
        """Stop calling the function that was given to `watch`."""

    def list_all(self) -> Iterable[tuple[Any, Any]]:
        """Add an entry for each parameter whose states only other ranks hold, so that all ranks have the same keys,
        then return all entries as `entries` does. Add nothing if this rank holds no state at all."""

    def entries(self) -> Iterable[tuple[Any, Any]]:
        """Return (tensor of the param groups, its states by kind) for each tensor whose states the optimizer itself
        holds."""


class OptimizerTensors:
    """Guards the tensors of ``optimizer``'s param groups and states: refuses uses by user code that would have no
    effect or differ between ranks.

    A guarded tensor has a class whose ``__torch_function__`` calls `used` before each torch function; a plain one is an
    ordinary parameter or tensor. In step hooks the model's own parameters are guarded too. Satisfies `TensorGuard`.

    ``named``: each tensor with its parameter's name and full shape. ``states``: the states that the optimizer holds.
    ``model``: refuses uses of the model's parameters in step hooks. ``own_hook``: handle of a step pre-hook that the
    engine has registered; the others are the user's. ``values_here``: the tensors hold the values that the optimizer
    updates, at least in its step; ``stay``: between steps too. ``split``: other ranks may hold other parts of the
    parameters. ``has_gradient``: returns whether the engine holds a gradient of the parameter of a name.
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
        self._guard(Phase.IDLE)

    @property
    def is_on(self) -> bool:
        """True if the tensors are guarded now, that is, except during the optimizer's own arithmetic."""
        return self._phase is not Phase.STEP

    def check_states(self) -> None:
        """Raise `PartitionError` if user code has assigned to a tensor's state another parameter's state, or a tensor
        of the parameter's full shape where this rank has only a part. Checks nothing before code has read states for
        the first time."""
        if not self._states_seen:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, kept in self._states.entries():
                reference = tensor.__dict__.get(REFERENCE) if isinstance(tensor, nn.Parameter) else None
                if reference is not None:
                    for kind, value in kept.items() if isinstance(kept, dict) else ():
                        _check_state(reference, tensor, kind, value)

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[None]:
        """Make tensors that hold values, and states, plain inside the block, for the engine's own work; on leaving,
        guard all as between steps."""
        self._unguard()
        try:
            yield
        finally:
            self._guard(Phase.IDLE)

    @property
    def is_hooked(self) -> bool:
        """True if the user has registered step pre-hooks, on this optimizer or for all optimizers."""
        hooks = self._own_hook.hooks_dict_ref()
        return bool(optimizers._global_optimizer_pre_hooks) or (hooks is not None and len(hooks) > 2)

    @property
    def is_hooked_after(self) -> bool:
        """True if the user has registered step post-hooks, on this optimizer or for all optimizers."""
        hooks = self._own_hooks[1].hooks_dict_ref()
        return bool(optimizers._global_optimizer_post_hooks) or (hooks is not None and len(hooks) > 1)

    def step(self, begin: Callable[[], None], updated_elsewhere: Sequence[nn.Parameter] = ()) -> Exception | None:
        """Run one step of the optimizer: the user's step pre-hooks, ``begin``, the optimizer's arithmetic, the user's
        post-hooks.

        Return the exception of a post-hook, as the update is complete then, or None; any other exception is raised.
        Call it inside `unguarded`. ``begin``: called without arguments just before the arithmetic.
        ``updated_elsewhere``: empty tensors of the param groups, of parameters that other ranks update; hooks find
        empty gradients in them.
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
        self._guard(Phase.HOOKS)

        def unguard_and_begin(*_: Any) -> None:
            """Check states, make the tensors plain, remove the empty gradients of tensors that other ranks update, and
            call ``begin``. A step pre-hook that runs after the user's; its arguments are ignored."""
            self.check_states()
            self._unguard()
            for tensor in updated_elsewhere:
                tensor.grad = None
            begin()

        handle = self._optimizer.register_step_pre_hook(unguard_and_begin)  # the last one of all
        try:
            return self._step_inner()
        finally:
            handle.remove()
            self._unguard()
            self._forget_empty()

    def _step_inner(self) -> Exception | None:
        """Call the optimizer's ``step()``. Return an exception that it raised after its arithmetic was done, else None;
        an exception from before is raised."""
        try:
            self._optimizer.step()
        except Exception as error:
            if not self._updated:
                raise
            return error
        return None

    def _forget_empty(self) -> None:
        """Set ``.grad`` to None in the tensors that `step` was given as updated elsewhere, which hooks found empty
        gradients in."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in self._elsewhere:
                tensor.grad = None
        self._elsewhere = ()

    def _note_entered(self, *_: Any) -> None:
        """Count one more nested call of the optimizer's ``step``. A step pre-hook; its arguments are ignored."""
        self._depth += 1

    def _note_updated(self, *_: Any) -> None:
        """Record that the arithmetic is done; when the outermost ``step`` ends, guard the tensors for the user's
        post-hooks, if there are any. The step post-hook that runs first; its arguments are ignored."""
        self._updated = True
        self._depth -= 1
        if self._depth == 0 and self._phase is Phase.STEP and self.is_hooked_after:
            for tensor in self._elsewhere:
                tensor.grad = torch.empty_like(tensor)
            self._guard(Phase.HOOKS)

    def remove(self) -> None:
        """Make the tensors plain for good and remove this object's step hooks. The tensors keep their parameters'
        names, for `left_by_an_engine`."""
        self._unguard()
        for hook in self._own_hooks:
            hook.remove()
        exchange_classes(self._tensors, _plain)
        for tensor in self._tensors:
            tensor.__dict__[RELEASED] = tensor.__dict__.pop(REFERENCE).name

    def used(self, reference: FragmentReference, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise `PartitionError` if a torch function that is about to run on a guarded tensor would have no effect, or
        would not do what it would do to the full parameter.

        ``func``, ``args``, ``keywords``: the torch function and its arguments. ``reference``: names the parameter of a
        guarded tensor among the arguments.
        """
        name, attribute, call = reference.name, attribute_of(func), name_of(func)
        if attribute == "grad" and call == "__get__":
            self._check_gradient_read(name)
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
        elif reference.is_updated and not self._readable and needs_values(call, attribute, args):
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
        """True while the user's step hooks run, if the tensors hold values then, which the hooks may write."""
        return self._phase is Phase.HOOKS and self._values_here

    @property
    def _readable(self) -> bool:
        """True if the tensors hold their values now; False while a tier or another rank holds them."""
        return self._values_here and (self._stay or self._phase is not Phase.IDLE)

    def _check_gradient_read(self, name: str) -> None:
        """Raise `PartitionError` for a read of ``.grad`` of parameter ``name``'s tensor while the engine holds the
        gradient, except by torch's own optimizer code and in step hooks."""
        if not self._in_hooks and self._has_gradient(name) and _reader() != _OPTIMIZER:  # zero_grad, after the engine's
            self._refuse_gradient(name, "read")

    def _refuse_gradient(self, name: str, how: str) -> NoReturn:
        """Raise `PartitionError`: user code has used ``.grad`` of the tensor of parameter ``name``. ``how``: "read" or
        "written"."""
        where = ""
        if self._phase is Phase.HOOKS:
            where = " in a step hook. Where a tier updates the weights, step hooks have no gradients. Do it before "
            where += "engine.step()"
        raise PartitionError(
            f".grad of a tensor of optimizer.param_groups that belongs to parameter '{name}' was {how}{where}: the "
            "engine holds the gradients, averaged and sharded, and what is done to a fragment's would be lost or "
            "differ between ranks. Read engine.full_grad(p), write engine.set_full_grad(p, value) or p.grad = value of "
            "the model's parameter p, clip with engine.clip_grad_norm_, zero with engine.zero_grad. The weights were "
            "not changed."
        )

    def _refuse_write(self, name: str, how: str) -> NoReturn:
        """Raise `PartitionError`: user code would write the tensor of parameter ``name``. ``how``: name of the torch
        function or attribute by which it would."""
        hooks = ", or do it in optimizer.register_step_post_hook" if self._values_here else ""
        raise PartitionError(
            f"{how} would write a tensor of optimizer.param_groups that belongs to parameter '{name}': this rank's "
            "fragment of its master, which forward does not read. Write the model's parameter instead, inside "
            f"`with engine.gathered([p], modifier_rank=0)`{hooks}. Nothing was written."
        )

    @staticmethod
    def _writes(call: str, attribute: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Return whether a torch function would write a guarded tensor of the param groups or a view of one; False for
        states.

        ``call``: the function's name. ``attribute``: the attribute that it reads or sets, "" for none. ``args``,
        ``keywords``: its arguments.
        """
        if call == "__set__":
            return attribute == "data" and isinstance(args[0], FragmentTensor)
        references = map(guard_of, written_by(call, args, keywords))
        return any(reference is not None and reference.is_updated for reference in references)

    def _unguard(self, *_: Any) -> None:
        """Make states, and tensors that hold values, plain for the optimizer's arithmetic; stop guarding the model's
        parameters and watching for reads of states."""
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

    def _guard(self, phase: Phase) -> None:
        """Enter ``phase``, IDLE or HOOKS, and guard the tensors, and the states if code has read them before. HOOKS
        also guards the model's parameters; IDLE stops guarding those."""
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
        """Guard the states that have their tensor's size, as code is about to read states; first add entries for states
        that only other ranks hold. Do nothing unless other ranks may hold other parts of the parameters."""
        if not self.split:
            return
        self._states_seen = True
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, kept in self._states.list_all():
                reference = tensor.__dict__.get(REFERENCE) if isinstance(tensor, nn.Parameter) else None
                if reference is None:
                    continue
                for value in tree_leaves(dict(kept) if isinstance(kept, dict) else kept):
                    if type(value) is torch.Tensor and value.dim() and value.is_same_size(tensor):
                        value.__class__ = FragmentValues
                        value.__dict__[REFERENCE] = dataclasses.replace(reference, is_updated=False)

    def _state_values(self) -> Iterator[Any]:
        """Yield every value, tensor or not, inside the states that the optimizer itself holds, with containers
        flattened."""
        for _, kept in self._states.entries():
            yield from tree_leaves(dict(kept) if isinstance(kept, dict) else kept)


def _check_state(reference: FragmentReference, tensor: torch.Tensor, kind: str, value: Any) -> None:
    """Raise `PartitionError` if ``value``, the state ``kind`` of ``tensor``, belongs to another parameter, or has the
    full shape while ``tensor`` is a part. ``reference``: name and full shape of the parameter of ``tensor``."""
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
    """Return the name of the parameter of which ``tensor`` was a fragment in an engine that is destroyed; None for any
    other tensor."""
    return tensor.__dict__.get(RELEASED)


def _plain(kind: type) -> type:
    """Return the class that makes a tensor of the param groups plain; ``kind`` is the class it has now."""
    return nn.Parameter if kind is FragmentTensor else kind


def _unguarded(_kind: type) -> type:
    """Return the class that makes a state plain, whatever class it has now."""
    return torch.Tensor


def _guarded(kind: type) -> type:
    """Return the class that guards a tensor of the param groups; ``kind`` is the class it has now, and stays for a fake
    tensor."""
    return FragmentTensor if kind is nn.Parameter else kind  # torch's fake tensors have a class of their own


def _reader() -> str:
    """Return the name of the module of the nearest caller outside this package, which is the code that reads a
    gradient."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("zero_partition"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
