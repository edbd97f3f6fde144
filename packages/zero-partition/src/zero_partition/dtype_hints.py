"""Say which module was given inputs of another dtype than its parameters have, in place of torch's "same dtype"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .errors import PartitionError

_WORDS = ("dtype", "scalar type", "should be the same")
"""Words of torch's errors about dtypes, each of which has one of them at least."""
_KEYS = {torch.float16: "fp16.auto_cast", torch.bfloat16: "bf16.auto_cast"}


@contextmanager
def naming_dtypes(model: nn.Module, inputs: Any) -> Iterator[None]:
    """A context for a forward pass of ``model``, in which errors of torch about dtypes are made to name the module.

    An error in a module whose parameters have another floating dtype than ``inputs``, nested containers of tensors,
    becomes a `PartitionError` that names the module, both dtypes and the key of the configuration that casts inputs.
    Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PartitionError) or not any(word in str(error) for word in _WORDS):
            raise
        module = _innermost(model, error.__traceback__)
        own = None if module is None else _dtype_of(module.parameters(recurse=False))
        given = _dtype_of(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        if module is None or own is None or given in (None, own):
            raise
        name = next(name for name, known in model.named_modules() if known is module)
        what = f"'{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        key = f"Set {_KEYS[own]} to true in the configuration, or cast" if own in _KEYS else "Cast"
        raise PartitionError(
            f"forward of {what}: its parameters are {own}, and the model was given {given} inputs. {key} them in the "
            f"script: x.to({own}). torch says: {error}"
        ) from error


def _innermost(model: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """Return the module of ``model`` whose method was called last in ``trace``; None if there is none."""
    known, found = set(model.modules()), None
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        found = module if isinstance(module, nn.Module) and module in known else found
        trace = trace.tb_next
    return found


def _dtype_of(tensors: Iterator[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of the first floating tensor; None without one."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
