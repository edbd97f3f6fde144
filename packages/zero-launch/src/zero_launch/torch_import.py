"""The import of torch, which the garbage collector neither interrupts nor looks through afterwards.

torch's import makes half a million objects that stay. The collector looks through them hundreds of times while they are
made, again whenever it looks through everything during the training, and twice more when the interpreter ends: together
more than a third of the processor time in which a process imports torch and ends.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_NAME = "torch"


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of `sys.meta_path` that finds torch as Python does, and has torch's module code run without the garbage
    collector."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module spec of torch, whose loader runs torch's code by `_run_without_collector`; None for any
        other module, and if torch is not installed."""
        if fullname != _NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            loader.exec_module = functools.partial(_run_without_collector, loader.exec_module)  # type: ignore[method-assign]
        return spec


def _run_without_collector(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run the module's code by ``execute`` without the garbage collector, and exempt all objects that then exist from
    later collections."""
    collects = gc.isenabled()
    gc.disable()
    try:
        execute(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def keep_from_collector() -> None:
    """Arrange that a later `import torch` in this process runs without the garbage collector, and that no collection
    looks at its objects afterwards. Do nothing if torch is imported already.

    Only for processes that are the launcher's own or a rank: all other objects that exist when torch is imported are
    exempted too, and never freed if they lie in a reference cycle.
    """
    if _NAME not in sys.modules:
        sys.meta_path.insert(0, _Finder())
