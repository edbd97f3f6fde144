"""Finding, checking, collecting and measuring gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from zero_optim_kernels import l2_norm_squared

from .._lanes import Lane
from .._memory import HostBlock, nbytes_of
from ._entries import KERNEL_DTYPES, Entry

__all__ = ["GradientHost", "check_gradient", "current_gradient", "total_norm"]


def current_gradient(entry: Entry) -> torch.Tensor | None:
    """The entry's gradient, 1-D and contiguous: on the host where it was offloaded, else where autograd left it."""
    if entry.grad_ready:
        return entry.grad
    grad = entry.param.grad
    return None if grad is None else grad.detach().contiguous().view(-1)


def check_gradient(entry: Entry) -> None:
    """TypeError or ValueError, naming the parameter, for a gradient that the kernels cannot read."""
    param, grad = entry.param, entry.param.grad
    if not param.is_contiguous():
        raise ValueError(
            f"'{entry.name}': expected a contiguous parameter, got strides {param.stride()} for {tuple(param.shape)}"
        )
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise TypeError(
            f"'{entry.name}': sparse gradients are not supported, got layout {grad.layout}; use sparse=False"
        )
    if grad.dtype != param.dtype or grad.device != param.device:
        raise TypeError(
            f"'{entry.name}': expected a gradient of {param.dtype} on {param.device}, got {grad.dtype} on {grad.device}"
        )


def total_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all gradients together, in float64 where they are in host memory."""
    here = [grad for grad in gradients if grad.device.type == "cpu"]
    away = [grad for grad in gradients if grad.device.type != "cpu"]
    squared = float(torch.nn.utils.get_total_norm(away)) ** 2 if away else 0.0
    for dtype, name in KERNEL_DTYPES.items():
        own = [grad for grad in here if grad.dtype == dtype]
        if own:
            squared += l2_norm_squared([g.data_ptr() for g in own], [g.numel() for g in own], dtype=name)  # type: ignore[arg-type]
    return math.sqrt(squared)


class GradientHost:
    """Takes each gradient to the host as soon as autograd has finished it, and frees the device's.

    Several backward passes add up, in the gradient's dtype as torch does.
    """

    def __init__(self, device: torch.device, entries: Sequence[Entry]) -> None:
        self._lane = Lane(device)
        self._entries = entries
        self._block = HostBlock(gradient_bytes(entries), pin=device.type != "cpu")
        self._event: torch.Event | None = None
        position = 0
        for entry in sorted(entries, key=lambda entry: -entry.param.element_size()):
            entry.grad = self._block.view(position, entry.numel, entry.param.dtype)
            position += nbytes_of(entry.grad)
        self._handles: list[RemovableHandle] = [
            entry.param.register_post_accumulate_grad_hook(partial(self._take, entry))  # type: ignore[no-untyped-call]
            for entry in entries
        ]

    @property
    def resident_bytes(self) -> int:
        """Host memory of the gradients."""
        return self._block.nbytes

    def settle(self) -> None:
        """Block until everything taken has arrived."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def clear(self) -> None:
        """Forget the gradients."""
        for entry in self._entries:
            entry.grad_ready = False

    def close(self) -> None:
        """Take no more gradients."""
        for handle in self._handles:
            handle.remove()
        for entry in self._entries:
            entry.grad, entry.grad_ready = None, False

    def _take(self, entry: Entry, param: torch.Tensor) -> None:
        check_gradient(entry)
        own, given = entry.grad, param.grad
        if own is None or given is None:
            return
        if entry.grad_ready:
            self.settle()
            own.add_(given.detach().reshape(-1).to(own.device))
        else:
            self._event = self._lane.copy(own, given.detach().reshape(-1)) or self._event
            entry.grad_ready = True
        param.grad = None


def gradient_bytes(entries: Sequence[Entry]) -> int:
    """Host memory of a `GradientHost`."""
    return sum(entry.numel * entry.param.element_size() for entry in entries)
