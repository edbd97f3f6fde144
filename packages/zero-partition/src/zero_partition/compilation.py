"""torch.compile of a partitioned model: modules that are gathered together are compiled together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .compat import compile_calls
from .hooks import ModuleHooks, ModuleWatch
from .unit import Unit


class CompiledRegions:
    """Compiles the regions of ``model``; `remove` makes them plain modules again.

    A region is a largest module whose released parameters all belong to units that the module's own call gathers: the
    full model where nothing is released, a block where blocks are units. The calls of all modules inside are reported
    before and after the compiled code, so gathers and releases happen between graphs and never inside one. Code between
    regions is not compiled.

    ``units``: all units. ``hooks``: those of the model, by which the calls are reported. ``options``: passed to
    `torch.compile`.

    Attributes:
        names: names of the compiled modules.
    """

    def __init__(self, model: nn.Module, units: list[Unit], hooks: ModuleHooks, **options: Any) -> None:
        regions = list(_regions("", model, units))
        self.names = [name for name, _, _ in regions]
        self._modules = [module for _, module, _ in regions]
        self._watches: list[ModuleWatch] = []
        calls = compile_calls(self._modules, options)
        for (name, module, used), compiled in zip(regions, calls, strict=True):
            inside = [hooks.watches[inner] for inner in _names_inside(name, module) if inner in hooks.watches]
            for watch in inside:
                watch.pre_hook.in_graph = watch.post_hook.in_graph = True
            self._watches += inside
            outer = hooks.new_watch(name, used, outermost=module is model)
            module._compiled_call_impl = _Region(module, outer, inside, compiled)

    def remove(self) -> None:
        """Have the modules run uncompiled again, and their own hooks report their calls. A compiled call that a module
        had before is not restored."""
        for module in self._modules:
            module._compiled_call_impl = None
        for watch in self._watches:
            watch.pre_hook.in_graph = watch.post_hook.in_graph = False


class _Region:
    """The compiled call of ``module``, with the reports for all modules inside.

    It is stored as the module's ``_compiled_call_impl``, which torch leaves out of copies and pickles. ``outer``:
    reports the calls of ``module`` itself. ``inside``: report those of the modules in it that have hooks. ``compiled``:
    the compiled call.
    """

    def __init__(
        self, module: nn.Module, outer: ModuleWatch, inside: list[ModuleWatch], compiled: Callable[..., Any]
    ) -> None:
        self._module = module
        self._outer = outer
        self._inside = inside
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Report that the module's call begins, run its compiled code, report the modules inside as run, and report
        that the call has ended, also by an exception; return the module's output."""
        self._outer.before_forward(self._module, args)
        output = None
        try:
            output = self._compiled(*args, **kwargs)
            for watch in self._inside:  # members of units that ran within the graph
                watch.before_forward(self._module, args)
                watch.after_forward(self._module, args, None)
        except BaseException:
            self._outer.after_forward(self._module, args, None)
            raise
        self._outer.after_forward(self._module, args, output)
        return output


def _regions(name: str, module: nn.Module, units: list[Unit]) -> Iterator[tuple[str, nn.Module, list[Unit]]]:
    """Yield (name, module, units with parameters in it) of every region in the subtree of ``module``, called
    ``name``."""
    held = {id(p) for p in module.parameters()}
    used = [u for u in units if any(id(p) in held for p in u.parameters)]
    if not used:
        return
    runs = type(module).forward is not nn.Module.forward
    if runs and all(name in u.plan.members for u in used if u.releasable):
        yield name, module, used
        return
    for key, child in module.named_children():
        yield from _regions(f"{name}.{key}" if name else key, child, units)


def _names_inside(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the names of ``module``, which is called ``name``, and of all modules inside it."""
    for inner, _ in module.named_modules():
        yield ".".join(filter(None, (name, inner)))
