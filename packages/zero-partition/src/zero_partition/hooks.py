"""Hooks of the runtime on the user's modules: torch's own, and nothing patched."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .calls import ModuleCalls, RunningCall
from .dispatch_modes import any_modes, innermost_transform, outside
from .errors import ReleasedParameterError
from .gradient_hook import GradientHook
from .saved_views import address_of
from .scripted import reports_calls, takes_hooks
from .unit import Unit, UnitState


class PassListener(Protocol):
    """The receiver of the hooks' reports; see [Note: the order of events] in passes.py."""

    def enter_module(self, name: str, units: Sequence[Unit], /) -> bool: ...
    def exit_module(
        self, name: str, units: Sequence[Unit], aliased: Sequence[Unit], failure: BaseException | None, /
    ) -> None: ...
    def keeper_done(self, name: str, units: Sequence[Unit], /) -> None: ...
    def before_backward(self, units: Sequence[Unit], /) -> None: ...
    def gradient_ready(self, unit: int, number: int, hook: GradientHook, /) -> None: ...


class FindsByParameter(Protocol):
    """Knows which releasable unit a parameter belongs to."""

    def unit_of(self, parameter: nn.Parameter, /) -> Unit | None: ...


class FindsByStorage(Protocol):
    """Knows which unit gathered memory belongs to."""

    def unit_of_storage(self, address: int, /) -> Unit | None: ...


class ModuleHooks:
    """Installs the hooks for ``units`` on ``model``; `remove` takes every one of them away.

    Every module that owns parameters of a unit, or is one of a unit's members, reports entry and exit. Outputs that
    require gradients report before their module's backward; the saved-tensor hooks (`SavedViews`) catch every other
    way backward can reach a unit.

    Attributes:
        watches: by module name, what reports that module's calls.
        listener, calls, parameters, memory: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        listener: PassListener,
        calls: ModuleCalls,
        parameters: FindsByParameter,
        memory: FindsByStorage,
    ) -> None:
        self.watches: dict[str, ModuleWatch] = {}
        self._handles: list[RemovableHandle | GradientHook] = []
        self.listener = listener
        self.calls = calls
        self.parameters = parameters
        self.memory = memory
        self._model = weakref.ref(model)
        for name, module in model.named_modules():
            touched = [u for u in units if _belongs(name, module, u)]
            if (touched or module is model) and takes_hooks(module):
                self._hook_module(name, module, touched, outermost=module is model)
        for unit in units:
            if unit.plan.trainable:
                for index, parameter in enumerate(unit.parameters):
                    report = partial(_report_gradient, weakref.ref(self), unit.index, index)
                    self._handles.append(GradientHook(parameter, report))

    def add_use(self, name: str, module: nn.Module, unit: Unit) -> None:
        """Have the calls of ``module`` use ``unit`` too."""
        unit.plan.members[name] = module
        if name not in self.watches:
            self._hook_module(name, module, [unit], outermost=False)
        elif unit not in self.watches[name].units:
            self.watches[name].use(unit)

    def new_watch(self, name: str, units: list[Unit], *, outermost: bool) -> ModuleWatch:
        """A watch for the calls of the module called ``name``, which is not registered with any module."""
        return ModuleWatch(name, units, self, outermost=outermost)

    def keep_around(self, name: str, unit: Unit) -> None:
        """Have ``unit`` stay until the module that calls the one called ``name`` is done, which does not gather it."""
        around, module = name, self._model()
        while around and module is not None:  # a container that has no forward calls nothing
            around = around.rpartition(".")[0]
            if type(module.get_submodule(around)).forward is not nn.Module.forward:
                break
        if module is not None and around not in self.watches:
            self._hook_module(around, module.get_submodule(around), [], outermost=False)
        watch = self.watches[around]
        if unit not in watch.keeps:
            watch.keeps.append(unit)
        self.calls.keep(unit, around)

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_module(self, name: str, module: nn.Module, units: list[Unit], *, outermost: bool) -> None:
        watch = self.new_watch(name, units, outermost=outermost)
        self.watches[name] = watch
        if any(u.releasable for u in units):
            hook = Hook(_released_as_meta(units))
            self._handles.append(module.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]
            refuse = Hook(_refuse_to_load(units))
            self._handles.append(module.register_load_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
        loaded = module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            Hook(lambda *_: _take_loaded_values(units))
        )
        self._handles.append(loaded)
        self._handles.append(module.register_forward_pre_hook(watch.on_enter))
        self._handles.append(module.register_forward_hook(watch.on_leave, always_call=True))


def _report_gradient(hooks: weakref.ref[ModuleHooks], unit: int, number: int, hook: GradientHook) -> None:
    owner = hooks()
    if owner is not None and any_modes():
        outside(owner.listener.gradient_ready, unit, number, hook)
    elif owner is not None:
        owner.listener.gradient_ready(unit, number, hook)


class ModuleWatch:
    """Reports the calls of one module, which uses ``units``.

    Attributes:
        keeps: units whose parameters its submodules return, and which stay until it is done.
    """

    def __init__(self, name: str, units: list[Unit], hooks: ModuleHooks, *, outermost: bool) -> None:
        self.name = name
        self.units = units
        self.on_enter = Hook(eager(self.enter))
        self.on_leave = Hook(eager(self.leave))
        self._hooks = hooks
        self._listener = hooks.listener
        self.keeps: list[Unit] = []
        self._outermost = outermost
        self._watches_outputs = outermost or any(u.releasable for u in units)
        self._entered = hooks.calls.stack()

    def use(self, unit: Unit) -> None:
        """The module uses one more unit."""
        self.units.append(unit)
        self._watches_outputs = self._watches_outputs or unit.releasable

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Before the module's forward."""
        before = sys.exc_info()[1]
        self._entered.append(RunningCall(True, before))
        if not self._listener.enter_module(self.name, self.units):
            self._entered[-1] = RunningCall(False, before)

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """After the module's forward, also when it raised."""
        raised = sys.exc_info()[1]
        call = self._entered.pop() if self._entered else RunningCall(True, None)
        if not call.in_pass:
            return
        failure = raised if raised is not call.handled else None
        watches = (self._watches_outputs or self.keeps) and failure is None
        aliased = list(self._watch_outputs(output)) if watches else []
        self._listener.exit_module(self.name, self.units, aliased, failure)
        if self.keeps:
            self._listener.keeper_done(self.name, self.keeps)

    def _watch_outputs(self, output: Any) -> Iterator[Unit]:
        """Hook the outputs' gradients; yield the units whose storage an output shares."""
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor):
                continue
            if isinstance(leaf, nn.Parameter):  # it becomes a placeholder itself when its unit is released
                returned = self._hooks.parameters.unit_of(leaf)
                if returned is not None and self.name:
                    self._hooks.keep_around(self.name, returned)
                continue
            if leaf.requires_grad and leaf.grad_fn is not None and (self.units or self._outermost):
                leaf.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
            owner = self._hooks.memory.unit_of_storage(address_of(leaf))
            if owner is not None:
                yield owner

    def _on_output_gradient(self, _gradient: torch.Tensor) -> None:
        if innermost_transform() is not None:  # which differentiates by itself inside forward
            return
        if any_modes():
            outside(self._listener.before_backward, self.units)
        else:
            self._listener.before_backward(self.units)


def eager(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which torch.compile does not trace: graphs break there. Where nothing is compiled it is called as it
    is, for torch's guard around it takes longer than what most hooks do. Outside dispatch modes of the user's."""
    untraced: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return untraced(*args, **kwargs)
        return outside(call, *args, **kwargs) if any_modes() else call(*args, **kwargs)

    return run


class Hook:
    """A module hook that belongs to one engine: copies and pickles of the module carry one that does nothing.

    ``in_graph``: the module is traced as a part of a compiled region, which reports for it (see compilation.py).
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.in_graph = False
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.in_graph and torch.compiler.is_compiling():
            return None
        return self._call(*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Hook:
        return Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_nothing,)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _released_as_meta(units: list[Unit]) -> Callable[[nn.Module, dict[str, Any], str, Any], None]:
    """A state-dict hook: released entries become meta tensors, so that saving them cannot pass for a checkpoint."""
    places = {id(p): unit for unit in units if unit.releasable for p in unit.parameters}

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for key, parameter in _reported_parameters(module):
            unit = places.get(id(parameter))
            released = unit is not None and unit.state is UnitState.RELEASED
            if released and parameter is not None and prefix + key in state_dict:
                state_dict[prefix + key] = torch.empty_like(parameter, device="meta")

    return hook


def _refuse_to_load(units: list[Unit]) -> Callable[..., None]:
    """A load-state-dict hook: released parameters have no memory to load into, which is said by name."""
    places = {id(p): (unit, n) for unit in units if unit.releasable for n, p in enumerate(unit.parameters)}

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_more: Any) -> None:
        for key, parameter in module._parameters.items():
            unit, number = places.get(id(parameter), (None, 0))
            if unit is not None and unit.state is UnitState.RELEASED and prefix + key in state_dict:
                raise ReleasedParameterError(
                    f"load_state_dict: parameter '{unit.names[number]}' is released. Load inside "
                    "`engine.gathered(list(model.parameters()), modifier_rank=0)`, and take the state dict inside "
                    "`engine.gathered(...)` too."
                )

    return hook


def _reported_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter | None]]:
    """The module's own parameters, and those of scripted modules in it, which take no hooks of their own."""
    for key, parameter in module._parameters.items():
        yield prefix + key, parameter
    for key, child in module.named_children():
        if not reports_calls(child):
            yield from _reported_parameters(child, f"{prefix}{key}.")


def _take_loaded_values(units: list[Unit]) -> None:
    """``load_state_dict`` has written parameters: masters and shards follow."""
    for unit in units:
        if not unit.releasable:
            unit.write_back()


def _belongs(name: str, module: nn.Module, unit: Unit) -> bool:
    """Return whether running ``module`` uses ``unit``: it is one of its members or owns one of its parameters."""
    if name in unit.plan.members:
        return True
    held = {id(p) for p in unit.parameters}
    return any(id(p) in held for p in module._parameters.values() if p is not None)


def wraps_tensors() -> bool:
    """Return whether a transform of torch.func wraps the tensors that are made here."""
    try:
        torch.empty(0).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False
