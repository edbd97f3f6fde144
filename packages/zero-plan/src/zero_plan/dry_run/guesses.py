"""Guessed values for a script that reads values outside its model: losses that it prints, seeds, orders of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .fakes import asking_outside_torch, place_of

_aten = torch.ops.aten


class Guesses:
    """Answers 1 for a number and False for a truth value while no module runs, and keeps the lines of code that asked.

    ``computing``: returns whether a module is running. Orders of samples (`torch.randperm`) are drawn, not guessed.

    Attributes:
        lines: the lines of code that got an answer, in order.
    """

    def __init__(self, computing: Callable[[], bool]) -> None:
        self._computing = computing
        self.lines: dict[str, None] = {}

    def value(self, func: Any, args: Any, place: str) -> bool | float | None:
        """Return the answer to an operation that reads a value at ``place`` (a line of code), or None if that is an
        error.
        """
        if self._computing():
            return None
        if func is _aten.equal.default:
            self.lines[place] = None
            return True
        if func is not _aten._local_scalar_dense.default:
            return None
        self.lines[place] = None
        dtype = args[0].dtype
        if dtype == torch.bool:
            return False
        return 1.0 if dtype.is_floating_point or dtype.is_complex else 1

    def is_real(self, func: Any) -> bool:
        """Return whether an operation draws an order of samples, which must have real values."""
        return func in (_aten.randperm.default, _aten.randperm.generator) and not self._computing()

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of ones for a tensor whose values the calling line converts as a whole."""
        self.lines[place_of(asking_outside_torch())] = None
        return torch.ones(tensor.shape, dtype=tensor.dtype)


class ScriptReads(TorchFunctionMode):
    """Lets a script format scalars that have no value, and convert tensors without memory to lists and to NumPy."""

    def __init__(self, guesses: Guesses) -> None:
        super().__init__()
        self._guesses = guesses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch, with guesses for formatting and conversion of fake tensors."""
        tensor = args[0] if args else None
        if isinstance(tensor, FakeTensor):
            if func is torch.Tensor.__format__ and tensor.dim() == 0:
                return format(tensor.item(), *args[1:])
            if func in (torch.Tensor.tolist, torch.Tensor.numpy):
                with _disable_current_modes():
                    return func(self._guesses.taken(tensor))
        return func(*args, **(kwargs or {}))
