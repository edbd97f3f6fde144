"""The local sum of a reduce-scatter on accelerators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from .slices import sum_slices

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def sum_slices_on_device(
    slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool = False
) -> None:
    """Sum ``slices`` in order, divide by ``divisor``, and write the result to ``out`` or with ``accumulate`` add it
    there (a `SliceSum`): on CUDA devices in one Triton kernel, elsewhere by `sum_slices`.

    The kernel reads each slice once, where plain torch reads and writes the sum for each. It is used where the slices
    lie evenly spaced in memory and are summed in float32, and triton can be imported; results are bitwise equal.
    """
    stride = _common_stride(slices)
    kernel = _triton_sum() if out.device.type == "cuda" and stride and out.numel() else None
    if kernel is None or out.dtype is not torch.float32 or slices[0].dtype not in _NARROW or not out.is_contiguous():
        sum_slices(slices, out, divisor=divisor, accumulate=accumulate)
    else:
        kernel(slices[0], out, stride=stride, count=len(slices), divisor=divisor, accumulate=accumulate)


def _common_stride(slices: Sequence[torch.Tensor]) -> int:
    """Return the number of elements from the beginning of each slice to that of the next in memory; 0 if it is not the
    same for all or not whole, if there are fewer than two slices, or if one is not contiguous."""
    if len(slices) < 2 or not all(s.is_contiguous() for s in slices):
        return 0
    places = [s.data_ptr() for s in slices]
    distance = places[1] - places[0]
    even = all(after - before == distance for before, after in itertools.pairwise(places))
    return distance // slices[0].element_size() if even and distance % slices[0].element_size() == 0 else 0


@functools.cache
def _triton_sum() -> Callable[..., None] | None:
    """Return `sum_evenly_spaced`, the function that runs the Triton kernel; None where triton cannot be imported."""
    try:
        from ._triton_slices import sum_evenly_spaced
    except ImportError:
        return None
    return sum_evenly_spaced
