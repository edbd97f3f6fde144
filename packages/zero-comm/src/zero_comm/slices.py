"""The local sum of the one reduction: slices in rank order, in the accumulate dtype, divided once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

_BLOCK = 1 << 15  # elements; a block of every slice and of the sum stays in the cache


class SliceSum(Protocol):
    """Sums equal slices in the order given into ``out``, then divides once by ``divisor``.

    ``slices``: N tensors of shape (n,), one dtype. ``out``: shape (n,), the accumulate dtype. With ``accumulate`` the
    quotient is added to ``out`` instead of replacing it. ``out`` may be one of the slices.
    """

    def __call__(
        self, slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool
    ) -> None: ...


def sum_slices(slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool = False) -> None:
    """Plain torch `SliceSum`, blocked so that the running sum does not leave the cache."""
    block = _BLOCK if out.device.type == "cpu" else out.numel()
    scratch = torch.empty(min(block, out.numel()), dtype=out.dtype, device=out.device)
    for start in range(0, out.numel(), block):
        target = out[start : start + block]
        total = scratch[: target.numel()].copy_(slices[0][start : start + block])
        for other in slices[1:]:
            total.add_(other[start : start + block].to(out.dtype))
        if divisor != 1:
            total.div_(divisor)
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)
