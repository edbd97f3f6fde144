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
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@contextmanager
def naming_dtypes(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Make torch's errors about dtypes, in a forward pass of ``model`` inside the block, name the module.

    An error in a module whose parameters have another floating dtype than ``inputs`` (nested containers of tensors) or
    than a buffer of the model becomes a `PartitionError` that names the module, both dtypes and the key of the
    configuration that casts the inputs or the buffer. Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PartitionError) or not any(word in str(error) for word in _WORDS):
            raise
        module = _innermost(model, error.__traceback__)
        own = None if module is None else _dtype_of(module.parameters(recurse=False))
        if module is None or own is None:
            raise
        given = _dtype_of(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        cause = _by_buffer(model, own) if given in (None, own) else _by_inputs(given, own)
        if not cause:
            raise
        name = next(name for name, known in model.named_modules() if known is module)
        what = f"'{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        raise PartitionError(f"forward of {what}: its parameters are {own}, and {cause} torch says: {error}") from error


def _by_inputs(given: torch.dtype | None, own: torch.dtype) -> str:
    """Return the part of an error's text that says that inputs of dtype ``given`` do not fit parameters of dtype
    ``own``, and what to do."""
    key = f"Set {_NAMES[own]}.auto_cast to true in the configuration, or cast" if own in _NAMES else "Cast"
    return f"the model was given {given} inputs. {key} them in the script: x.to({own})."


def _by_buffer(model: nn.Module, own: torch.dtype) -> str:
    """Return the part of an error's text that names a buffer of ``model`` with a wider dtype than ``own``, the
    half-precision dtype of a module's parameters, and says what to do: what is computed with the buffer has its dtype.
    "" if there is none."""
    wider = (
        (name, b) for name, b in model.named_buffers() if b.is_floating_point() and b.dtype.itemsize > own.itemsize
    )
    name, buffer = next(wider, ("", None))
    if buffer is None or own not in _NAMES:
        return ""
    return (
        f"a buffer such as '{name}' is {buffer.dtype}: what is computed with it is too. Set data_types.buffer_dtype to "
        f'"{_NAMES[own]}" in the configuration, or cast it in the script: x * buffer.to({own}).'
    )


def _innermost(model: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """Return the module of ``model`` whose method was called last in ``trace``; None if there is none."""
    known, found = set(model.modules()), None
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        found = module if isinstance(module, nn.Module) and module in known else found
        trace = trace.tb_next
    return found


def _dtype_of(tensors: Iterator[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor among ``tensors``; None without one."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
