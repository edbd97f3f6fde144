"""torch.compile of a partitioned model: what is gathered together becomes one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .compat import compile_calls
from .hooks import ModuleHooks, ModuleWatch
from .unit import Unit


class CompiledRegions:
    """The compiled parts of a model; `remove` makes them plain modules again.

    A region is the largest module whose sharded parameters all belong to units that the module's own call gathers: the
    whole model where nothing is released, a block where blocks are units. It reports entry and exit for everything
    inside before and after the compiled code, so that gathers and releases stand between graphs and never in one. What
    lies between regions is not compiled.

    ``options``: for `torch.compile`.

    Attributes:
        names: of the compiled modules.
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
                watch.on_enter.in_graph = watch.on_leave.in_graph = True
            self._watches += inside
            outer = hooks.new_watch(name, used, outermost=module is model)
            module._compiled_call_impl = _Region(module, outer, inside, compiled)

    def remove(self) -> None:
        """Run the modules as they are again."""
        for module in self._modules:
            module._compiled_call_impl = None
        for watch in self._watches:
            watch.on_enter.in_graph = watch.on_leave.in_graph = False


class _Region:
    """Stands in torch's own place for a module's compiled call, which copies and pickles of a module leave behind."""

    def __init__(
        self, module: nn.Module, outer: ModuleWatch, inside: list[ModuleWatch], compiled: Callable[..., Any]
    ) -> None:
        self._module = module
        self._outer = outer
        self._inside = inside
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._outer.enter(self._module, args)
        output = None
        try:
            output = self._compiled(*args, **kwargs)
            for watch in self._inside:  # members of units that ran within the graph
                watch.enter(self._module, args)
                watch.leave(self._module, args, None)
        except BaseException:
            self._outer.leave(self._module, args, None)
            raise
        self._outer.leave(self._module, args, output)
        return output


def _regions(name: str, module: nn.Module, units: list[Unit]) -> Iterator[tuple[str, nn.Module, list[Unit]]]:
    """Yield name, module and the units used in it, for every region of a subtree."""
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
    """Yield the names of the modules of a subtree."""
    for inner, _ in module.named_modules():
        yield ".".join(filter(None, (name, inner)))
