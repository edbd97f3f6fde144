"""The local sum in a reduce-scatter: slices in rank order or along a tree, in the accumulate dtype, divided once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

_BLOCK = 1 << 15  # elements; a block of every slice and of the sum stays in the cache


class SliceSum(Protocol):
    """Sums slices of equal length into ``out``, in the order given, then divides once by ``divisor``.

    Called when all ranks' slices of a reduce-scatter have arrived, in the thread that waits for it.

    ``slices``: N tensors of shape (n,), one dtype. ``out``: shape (n,), the accumulate dtype. With ``accumulate`` the
    quotient is added to ``out`` instead of replacing it. ``out`` may be one of the slices.
    """

    def __call__(
        self, slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool
    ) -> None: ...


def sum_slices(slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool = False) -> None:
    """Sum ``slices`` in order, divide by ``divisor``, and write the result to ``out`` or with ``accumulate`` add it
    there: a `SliceSum` in plain torch. It works in blocks, so that the running sum stays in cache.

    On every device the result is that of adding in ``out``'s dtype and one division.
    """
    block = _BLOCK if out.device.type == "cpu" else out.numel()
    scratch = torch.empty(min(block, out.numel()), dtype=out.dtype, device=out.device)
    for start in range(0, out.numel(), block):
        target = out[start : start + block]
        total = scratch[: target.numel()].copy_(slices[0][start : start + block])
        for other in slices[1:]:
            part = other[start : start + block]  # an accelerator's kernel converts as it adds
            total.add_(part if out.device.type != "cpu" else part.to(out.dtype))
        if divisor != 1:  # CUDA would multiply by the inverse of a number of the host, which rounds twice
            total.div_(divisor if out.device.type == "cpu" else total.new_full((), divisor))
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)


class TreeSum:
    """`SliceSum` along a binary tree: adds slices 0 and 1, 2 and 3, …, then neighbouring sums, and so on.

    ``pair``: sums two slices, or two sums. The sum of every aligned block of 2^i slices is a node of the tree, so it is
    the same number whether one rank adds the block or several do.
    """

    def __init__(self, pair: SliceSum = sum_slices) -> None:
        self._pair = pair

    def __call__(self, slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool) -> None:
        """Sum ``slices``, 2^n of them, in ``out``'s dtype, divide the sum by ``divisor``, and write it to ``out``, or
        with ``accumulate`` add it there. Raises ValueError for another number of slices."""
        if not slices or len(slices) & (len(slices) - 1):
            raise ValueError(f"a binary tree sums a power of two of slices, got {len(slices)}")
        nodes = list(slices)
        while len(nodes) > 2:
            parents = [torch.empty_like(out) for _ in nodes[::2]]
            for number, parent in enumerate(parents):
                self._pair(nodes[2 * number : 2 * number + 2], parent, divisor=1, accumulate=False)
            nodes = parents
        self._pair(nodes, out, divisor=divisor, accumulate=accumulate)
