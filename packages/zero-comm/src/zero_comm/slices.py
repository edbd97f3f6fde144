"""The local sum of the one reduction: slices in rank order, in the accumulate dtype, divided once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

_BLOCK = 1 << 15  # elements; a block of every slice and of the sum stays in the cache


class SliceSum(Protocol):
    """Sums equal slices in the order given into ``out``, then divides once by ``divisor``.

    ``slices``: N tensors of shape (n,), one dtype. ``out``: shape (n,), the accumulate dtype. With ``accumulate`` the
    quotient is added to ``out`` instead of replacing it. ``out`` aliases no slice.
    """

    def __call__(
        self, slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool
    ) -> None: ...


def sum_slices(slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool = False) -> None:
    """Plain torch `SliceSum`, blocked so that the running sum does not leave the cache."""
    block = _BLOCK if out.device.type == "cpu" else out.numel()
    for start in range(0, out.numel(), block):
        target = out[start : start + block]
        parts = [s[start : start + block].to(out.dtype) for s in slices]
        if accumulate or len(parts) == 1:
            total = parts[0].clone() if parts[0].data_ptr() == slices[0][start:].data_ptr() else parts[0]
            for part in parts[1:]:
                total.add_(part)
        else:
            total = torch.add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                total.add_(part)
        if divisor != 1:
            total.div_(divisor)
        if accumulate:
            target.add_(total)
        elif total is not target:
            target.copy_(total)
