"""Substitutes for features that some versions of torch lack; each function names the version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch, from torch 2.8 on; its pre-releases count as the release."""


def compile_calls(modules: Sequence[nn.Module], options: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return the compiled call of each module; modules of one class share graphs, and each class has the full limit of
    recompilations.

    torch counts recompilations by function, and the calls of all modules are one function. From torch 2.12 on the limit
    is an argument; before, each class gets a function of its own. ``options``: arguments for `torch.compile`.
    """
    kinds = {type(module) for module in modules}
    if TORCH >= (2, 12):
        from torch._dynamo.config import recompile_limit

        limited = {"recompile_limit": len(kinds) * recompile_limit, **options}
        return [torch.compile(module._call_impl, **limited) for module in modules]
    functions = {kind: _function_for(kind) for kind in kinds}
    return [torch.compile(MethodType(functions[type(module)], module), **options) for module in modules]


def _function_for(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return a function that calls a module of class ``kind`` and has its own code object, so that torch before 2.12
    counts its recompilations separately."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the module ``self`` as `nn.Module.__call__` does where it has no compiled call."""
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace(co_name=f"call_of_{kind.__name__}")
    return call
