"""Guessed values for a script that reads tensors outside its model, such as a loss that it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .fakes import file_and_line, frame_outside_torch

_aten = torch.ops.aten


class Guesses:
    """A `ValueSource` for a script: while no module runs, it answers 1 for a number and False for a bool, and records
    which lines of code read values.

    ``computing``: returns whether a module is running. `torch.randperm` runs for real, so that samples have an order.

    Attributes:
        lines: files and lines of code that got a guessed value, as keys, in order.
    """

    def __init__(self, computing: Callable[[], bool]) -> None:
        self._computing = computing
        self.lines: dict[str, None] = {}

    def value_for(self, func: Any, args: Any, place: str) -> bool | float | None:
        """Return a guess for the number or bool that ``func`` reads (True for `torch.equal`), and add ``place`` to
        `lines`. Return None, which makes the read an error, while a module runs and for other operations.
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

    def runs_for_real(self, func: Any) -> bool:
        """Return whether ``func`` is `torch.randperm` and no module runs."""
        return func in (_aten.randperm.default, _aten.randperm.generator) and not self._computing()

    def ones_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a real tensor of ones with the shape and dtype of ``tensor``; add the line of the calling code to
        `lines`.
        """
        self.lines[file_and_line(frame_outside_torch())] = None
        return torch.ones(tensor.shape, dtype=tensor.dtype)


class ScriptReads(TorchFunctionMode):
    """Lets a script format fake scalars as guessed values, and convert fake tensors to lists and NumPy arrays of ones.
    ``guesses``: gives the ones and records the lines.
    """

    def __init__(self, guesses: Guesses) -> None:
        super().__init__()
        self._guesses = guesses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, a function of torch; where it formats a fake scalar or converts a fake tensor to a list or
        array, give guessed values.
        """
        tensor = args[0] if args else None
        if isinstance(tensor, FakeTensor):
            if func is torch.Tensor.__format__ and tensor.dim() == 0:
                return format(tensor.item(), *args[1:])
            if func in (torch.Tensor.tolist, torch.Tensor.numpy):
                with _disable_current_modes():
                    return func(self._guesses.ones_for(tensor))
        return func(*args, **(kwargs or {}))
