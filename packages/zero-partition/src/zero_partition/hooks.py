"""The runtime's hooks on the user's modules and parameters, all by torch's public hooks; nothing is patched.

The members of a unit are the modules whose forward uses it (`UnitPlan.members`). A releasable unit is one that may be
released, where parameters are sharded.
"""

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

from .arriving_weights import WeightArrivals
from .calls import ModuleCalls, RunningCall
from .dispatch_modes import any_modes, call_outside_modes, innermost_transform
from .gradient_hook import GradientHook
from .hints import Hints
from .host_facts import is_fake
from .saved_views import address_of
from .scripted import takes_hooks
from .state_dict_hooks import refuse_released_entries, replace_released_entries, write_back_loaded
from .unit import Unit


class PassListener(Protocol):
    """The receiver of the hooks' reports; see [Note: the order of events] in passes.py. Autograd calls the last two
    methods."""

    def enter_module(self, name: str, units: Sequence[Unit], /) -> bool:
        """Gather ``units``, which the module called ``name`` uses; return whether its call is part of a pass.

        Called before the module's forward. A call that is not part of a pass is not reported any further.
        """

    def exit_module(
        self, name: str, units: Sequence[Unit], aliased: Sequence[Unit], failure: BaseException | None, /
    ) -> None:
        """Release those of ``units`` whose modules have all run, but leave the memory of ``aliased`` to the outputs of
        the module called ``name``.

        ``aliased``: units whose flat buffers the outputs share. Called after the module's forward, also when it raised
        ``failure``.
        """

    def caller_done(self, name: str, units: Sequence[Unit], /) -> None:
        """Release those of ``units`` whose modules have all run. Called after `exit_module` of the module called
        ``name``, for the units whose parameters its submodules have returned to it."""

    def before_backward(self, units: Sequence[Unit], /) -> None:
        """Gather ``units``, whose parameters backward is about to read. Called when a gradient has reached an output of
        a module that uses them."""

    def gradient_ready(self, unit: int, number: int, hook: GradientHook, /) -> None:
        """Take the gradient of parameter ``number`` of the unit with index ``unit``. Called when autograd has finished
        accumulating it in ``.grad``; ``hook``: the parameter's hook that reports it."""


class FindsByParameter(Protocol):
    """Knows which releasable unit a parameter belongs to."""

    def unit_of(self, parameter: nn.Parameter, /) -> Unit | None:
        """Return the releasable unit of ``parameter``, None if it has none."""


class FindsByStorage(Protocol):
    """Knows which unit's flat buffer an address belongs to."""

    def unit_of_storage(self, address: int, /) -> Unit | None:
        """Return the unit whose flat buffer, gathered or on its way, has the storage at ``address``; None if there is
        none."""


class ModuleHooks:
    """Installs the hooks for ``units`` on ``model``; `remove` removes all of them.

    Every module that owns parameters of a unit, or is one of a unit's members, reports the begin and the end of its
    forward; such a module uses the unit. Outputs that require gradients report before their module's backward; the
    saved-tensor hooks (`SavedViews`) catch every other way in which backward can reach a unit. Parameters of trained
    units report their gradients. State-dict hooks keep released parameters from being saved or loaded as if they had
    values.

    ``listener``: gets the reports. ``calls``: knows which modules run. ``parameters``, ``memory``: find the unit of a
    parameter, and of an output's memory. ``arrivals``: published weights, which modules wait for before they run.

    Attributes:
        watches: by module name, the object that reports that module's calls.
        hints: the partition's warnings.
        listener, calls, parameters, memory, arrivals: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        listener: PassListener,
        calls: ModuleCalls,
        parameters: FindsByParameter,
        memory: FindsByStorage,
        arrivals: WeightArrivals,
    ) -> None:
        self.watches: dict[str, ModuleWatch] = {}
        self._handles: list[RemovableHandle | GradientHook] = []
        self.listener = listener
        self.calls = calls
        self.parameters = parameters
        self.memory = memory
        self.arrivals = arrivals
        self.hints = Hints()
        self._model = weakref.ref(model)
        for name, module in model.named_modules():
            touched = [u for u in units if _uses_unit(name, module, u)]
            if (touched or module is model) and takes_hooks(module):
                self._hook_module(name, module, touched, outermost=module is model)
        for unit in units:
            if unit.plan.trainable:
                for index, parameter in enumerate(unit.parameters):
                    report = partial(_report_gradient, weakref.ref(self), unit.index, index)
                    self._handles.append(GradientHook(parameter, report))

    def add_use(self, name: str, module: nn.Module, unit: Unit) -> None:
        """Have calls of ``module``, called ``name`` in the model, use ``unit`` too: it is gathered for them.

        The module becomes a member of the unit. It is hooked if it was not; a second call does nothing.
        """
        unit.plan.members[name] = module
        if name not in self.watches:
            self._hook_module(name, module, [unit], outermost=False)
        elif unit not in self.watches[name].units:
            self.watches[name].add_unit(unit)

    def new_watch(self, name: str, units: list[Unit], *, outermost: bool) -> ModuleWatch:
        """Return a watch for the calls of the module called ``name``, which uses ``units``; it reports nothing until
        the caller registers its hooks.

        ``outermost``: the module is the model, so gradients of its outputs are reported whatever units it uses.
        """
        return ModuleWatch(name, units, self, outermost=outermost)

    def keep_for_caller(self, name: str, unit: Unit) -> None:
        """Have ``unit`` kept gathered until the module that calls the one called ``name`` is done, in this pass and in
        later ones.

        The calling module is the nearest enclosing one that has a forward; it does not gather the unit itself. It is
        hooked if it was not.
        """
        around, module = name, self._model()
        while around and module is not None:  # a container that has no forward calls nothing
            around = around.rpartition(".")[0]
            if type(module.get_submodule(around)).forward is not nn.Module.forward:
                break
        if module is not None and around not in self.watches:
            self._hook_module(around, module.get_submodule(around), [], outermost=False)
        watch = self.watches[around]
        if unit not in watch.kept_for_call:
            watch.kept_for_call.append(unit)
        self.calls.add_caller(unit, around)

    def remove(self) -> None:
        """Remove all hooks. Calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_module(self, name: str, module: nn.Module, units: list[Unit], *, outermost: bool) -> None:
        """Register the forward and state-dict hooks of ``module``, which is called ``name`` and uses ``units``, and
        keep its watch in `watches`. ``outermost``: the module is the model."""
        watch = self.new_watch(name, units, outermost=outermost)
        self.watches[name] = watch
        if any(u.releasable for u in units):
            hook = Hook(replace_released_entries(units, self.hints))
            self._handles.append(module.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]
            refuse = Hook(refuse_released_entries(units))
            self._handles.append(module.register_load_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
        loaded = module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            Hook(lambda *_: write_back_loaded(units))
        )
        self._handles.append(loaded)
        self._handles.append(module.register_forward_pre_hook(watch.pre_hook))
        self._handles.append(module.register_forward_hook(watch.post_hook, always_call=True))


def _report_gradient(hooks: weakref.ref[ModuleHooks], unit: int, number: int, hook: GradientHook) -> None:
    """Report to the listener of ``hooks``, outside dispatch modes, that autograd has finished the gradient of parameter
    ``number`` of the unit with index ``unit``; do nothing once the hooks object is gone. ``hook``: the parameter's."""
    owner = hooks()
    if owner is not None and any_modes():
        call_outside_modes(owner.listener.gradient_ready, unit, number, hook)
    elif owner is not None:
        owner.listener.gradient_ready(unit, number, hook)


class ModuleWatch:
    """Reports the calls of one module, called ``name``, which uses ``units``, to the listener of ``hooks``.

    ``outermost``: the module is the model, so gradients of its outputs are reported whatever units it uses.

    Attributes:
        kept_for_call: units whose parameters submodules return; they stay gathered until this module is done.
        pre_hook, post_hook: `before_forward` and `after_forward` as hooks to register.
    """

    def __init__(self, name: str, units: list[Unit], hooks: ModuleHooks, *, outermost: bool) -> None:
        self.name = name
        self.units = units
        self.pre_hook = Hook(eager(self.before_forward, traced=self._before_traced_forward))
        self.post_hook = Hook(eager(self.after_forward))
        self._hooks = hooks
        self._listener = hooks.listener
        self._arrivals = hooks.arrivals
        self.kept_for_call: list[Unit] = []
        self._outermost = outermost
        self._watches_outputs = outermost or any(u.releasable for u in units)
        self._entered = hooks.calls.new_stack()

    def add_unit(self, unit: Unit) -> None:
        """Count ``unit`` among the units that the module uses from now on, which are reported with its calls."""
        self.units.append(unit)
        self._watches_outputs = self._watches_outputs or unit.releasable

    def before_forward(self, _module: nn.Module, _args: Any) -> None:
        """Report that the module's forward begins, so that its units are gathered, and keep for `after_forward` whether
        the call is part of a pass; a forward pre-hook. Published weights of the units are waited for first."""
        before = sys.exc_info()[1]
        self._entered.append(RunningCall(True, before))
        if self._arrivals.captures is not None and self._arrivals.captures():
            self._arrivals.stop_deferring()
        if self._arrivals.open:
            self._arrivals.before_forward([unit.arrival for unit in self.units])
        if not self._listener.enter_module(self.name, self.units):
            self._entered[-1] = RunningCall(False, before)

    def _before_traced_forward(self, module: nn.Module, args: Any) -> None:
        """Do what `before_forward` does where torch.compile traces around the module: what it makes reads weights
        without a class to ask, so steps wait for them from now on."""
        self._arrivals.stop_deferring()
        self.before_forward(module, args)

    def after_forward(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Report that the module's forward has ended; a forward hook, which torch calls also after an exception. Before
        that, hook the gradients of ``output`` unless forward raised.

        Does nothing if the call was no part of a pass. An exception that was being handled before forward is no failure
        of it.
        """
        raised = sys.exc_info()[1]
        call = self._entered.pop() if self._entered else RunningCall(True, None)
        if not call.in_pass:
            return
        failure = raised if raised is not call.handled else None
        watches = (self._watches_outputs or self.kept_for_call) and failure is None
        aliased = list(self._watch_outputs(output)) if watches else []
        self._listener.exit_module(self.name, self.units, aliased, failure)
        if self.kept_for_call:
            self._listener.caller_done(self.name, self.kept_for_call)

    def _watch_outputs(self, output: Any) -> Iterator[Unit]:
        """Hook the gradients of the tensors in ``output`` (any nesting); yield the units whose flat buffer one of the
        tensors shares.

        Gradients are not hooked where the module uses no unit and is not the model. A parameter in ``output`` keeps its
        unit gathered until the module that called this one is done.
        """
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor):
                continue
            if isinstance(leaf, nn.Parameter):  # it becomes a placeholder itself when its unit is released
                returned = self._hooks.parameters.unit_of(leaf)
                if returned is not None and self.name:
                    self._hooks.keep_for_caller(self.name, returned)
                continue
            if leaf.requires_grad and leaf.grad_fn is not None and (self.units or self._outermost):
                leaf.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
            owner = self._hooks.memory.unit_of_storage(address_of(leaf))
            if owner is not None:
                yield owner

    def _on_output_gradient(self, _gradient: torch.Tensor) -> None:
        """Report that backward is about to read the module's units; do nothing inside a transform of torch.func."""
        if innermost_transform() is not None:  # which differentiates by itself inside forward
            return
        if any_modes():
            call_outside_modes(self._listener.before_backward, self.units)
        else:
            self._listener.before_backward(self.units)


def eager(call: Callable[..., Any], *, traced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return ``call`` wrapped so that torch.compile does not trace it (graphs break there), and the user's dispatch
    modes do not see its operations. ``traced``: called in its place where torch.compile would trace it.

    Where nothing is compiled and no mode is active, ``call`` runs directly: torch's guard takes longer than most hooks.
    """
    untraced: Callable[..., Any] = torch.compiler.disable(traced or call)  # type: ignore[no-untyped-call]

    def run(*args: Any, **kwargs: Any) -> Any:
        """Call ``call`` outside the user's dispatch modes, and untraced where torch.compile traces."""
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return untraced(*args, **kwargs)
        return call_outside_modes(call, *args, **kwargs) if any_modes() else call(*args, **kwargs)

    return run


class Hook:
    """A module hook of one engine, which runs ``call``; copies and pickles of the module get one that does nothing.

    Attributes:
        in_graph: the module is traced as part of a compiled region, which reports its calls (see compilation.py), so
            the hook does nothing while torch.compile traces.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.in_graph = False
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook's ``call`` with the arguments that torch gives, and return its result; None, without a call,
        while torch.compile traces the module inside a compiled region (`in_graph`)."""
        if self.in_graph and torch.compiler.is_compiling():
            return None
        return self._call(*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Hook:
        """Return a hook that does nothing."""
        return Hook(_do_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle writes: a hook that does nothing."""
        return Hook, (_do_nothing,)


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, with any arguments: the call of a copied or unpickled `Hook`."""
    return None


def _uses_unit(name: str, module: nn.Module, unit: Unit) -> bool:
    """Return whether ``module``, which is called ``name``, uses ``unit``: it is one of its members or owns one of its
    parameters."""
    if name in unit.plan.members:
        return True
    held = {id(p) for p in unit.parameters}
    return any(id(p) in held for p in module._parameters.values() if p is not None)


def surroundings(units: Sequence[Unit]) -> str:
    """Return, in words, what runs around the caller and makes gathering ``units`` impossible: a transform of
    torch.func, a trace by torch.jit, or a fake mode (`torch.export`) around a model that is not fake itself; "" if
    nothing does."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace"
    try:
        probe = torch.empty(0)
        probe.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return "a transform of torch.func (grad, vjp, jacrev, hessian, jvp, …)"
    is_foreign = is_fake(probe) and not any(is_fake(unit.parameters[0]) for unit in units[:1])
    return "torch.export or a FakeTensorMode" if is_foreign else ""
