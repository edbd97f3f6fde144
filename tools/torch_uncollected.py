"""Have interpreters that tests start import torch, and frameworks of its size, without the garbage collector.

`tools/environments.py` copies this file into an environment, beside a `.pth` file that imports it when an interpreter
starts; it acts where ZERO_TORCH_UNCOLLECTED is set, which `tools/suites.py` does. The suites start hundreds of
interpreters that import torch. The collector would look through the half a million objects that torch makes while it
makes them, whenever it looks through everything, and when the interpreter ends: a quarter of the processor time of such
a process, and more where Transformers' Trainer is imported too. zero-launch does the same with torch for its ranks
(`zero_launch.torch_import`). Tests of import costs, or of the collector, start interpreters without the variable.

Standard library only, and little of it: interpreters that never import torch import this too.
"""

import os
import sys

_MODULES = {
    "accelerate",
    "comet_ml",
    "lightning",
    "torch",
    "torch._dynamo",
    "transformers",
    "transformers.modeling_utils",
    "transformers.trainer",
}


class _Finder:
    """A finder of `sys.meta_path` that finds `_MODULES` where they are, and has them run without the collector."""

    def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
        """Return the spec of a module of `_MODULES`, whose loader runs it uncollected; None for any other module, and
        if it is not installed."""
        if fullname not in _MODULES:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _uncollected(spec.loader.exec_module)
        return spec


def _uncollected(execute):  # type: ignore[no-untyped-def]
    """Return ``execute``, run without the collector, which passes over all objects that then exist from there on."""
    import gc

    def run(module):  # type: ignore[no-untyped-def]
        collects = gc.isenabled()
        gc.disable()
        try:
            execute(module)
            gc.freeze()
        finally:
            if collects:
                gc.enable()

    return run


if "ZERO_TORCH_UNCOLLECTED" in os.environ:
    sys.meta_path.insert(0, _Finder())
