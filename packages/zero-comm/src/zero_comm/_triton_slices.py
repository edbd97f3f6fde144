"""The sum of slices in one Triton kernel, bitwise equal to `sum_slices`. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048  # elements of the sum that one program holds


@triton.jit
def _sum_kernel(
    first,
    out,
    numel,
    stride,
    divisor,
    COUNT: tl.constexpr,
    DIVIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum ``COUNT`` slices of ``numel`` elements in float32 into ``out``; each program sums ``TILE`` elements.
    ``first`` points to the first slice; each next one begins ``stride`` elements later. ``DIVIDE``: divide the sum by
    ``divisor``. ``ACCUMULATE``: add the result to ``out`` instead of replacing it."""
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    total = tl.load(first + places, mask=inside, other=0.0).to(tl.float32)
    for number in range(1, COUNT):
        total += tl.load(first + number * stride + places, mask=inside, other=0.0).to(tl.float32)
    if DIVIDE:
        total = tl.div_rn(total, tl.full((TILE,), divisor, tl.float32))
    if ACCUMULATE:
        total += tl.load(out + places, mask=inside, other=0.0)
    tl.store(out + places, total, mask=inside)


def sum_evenly_spaced(
    first: torch.Tensor, out: torch.Tensor, *, stride: int, count: int, divisor: int, accumulate: bool
) -> None:
    """Sum ``count`` slices in order, divide by ``divisor``, and write the result to ``out``, or with ``accumulate`` add
    it there (see `SliceSum`). ``first``: the first slice; the others follow in memory, each ``stride`` elements after
    the one before. ``out``: float32, contiguous, and as long as a slice."""
    with torch.cuda.device_of(out):
        _sum_kernel[(triton.cdiv(out.numel(), _TILE),)](
            first,
            out,
            out.numel(),
            stride,
            float(divisor),
            COUNT=count,
            DIVIDE=divisor != 1,
            ACCUMULATE=accumulate,
            TILE=_TILE,
        )
