"""The native kernels in the shapes that the other packages ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

import zero_optim_kernels as kernels
from zero_comm import SliceSum, sum_slices
from zero_partition import NormSquared, norm_squared

_DTYPES: dict[torch.dtype, Literal["f64", "f32", "bf16", "f16"]] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
_SMALL = 1 << 14  # elements; below, one thread


class NativeSliceSum:
    """`zero_comm.SliceSum` by the CPU kernel; tensors elsewhere are summed by torch."""

    def __call__(self, slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool) -> None:
        """Sum in the order given in float32 (float64 for float64), divide once, write or add to ``out``."""
        if out.device.type != "cpu":
            sum_slices(slices, out, divisor=divisor, accumulate=accumulate)
            return
        aliased = any(s.data_ptr() == out.data_ptr() for s in slices) and slices[0].dtype != out.dtype
        target = torch.empty_like(out) if accumulate or aliased else out
        kernels.sum_slices(
            [s.data_ptr() for s in slices],
            target.data_ptr(),
            out.numel(),
            dtype=_DTYPES[slices[0].dtype],
            out_dtype=_DTYPES[out.dtype],
            divisor=float(divisor),
            threads=_threads(out),
        )
        if accumulate:
            out.add_(target)
        elif target is not out:
            out.copy_(target)


class NativeNormSquared:
    """`zero_partition.NormSquared` by the CPU kernel; tensors elsewhere by torch."""

    def __call__(self, x: torch.Tensor) -> float:
        """Sum of squares in float64, in an order that depends on the length only."""
        if x.device.type != "cpu":
            return norm_squared(x)
        return kernels.l2_norm_squared(x.data_ptr(), x.numel(), dtype=_DTYPES[x.dtype], threads=_threads(x))


def slice_sum() -> SliceSum:
    """The local sum of the one reduction."""
    return NativeSliceSum()


def norm() -> NormSquared:
    """The sum of squares for the global norm."""
    return NativeNormSquared()


def _threads(x: torch.Tensor) -> int:
    return 1 if x.numel() < _SMALL else torch.get_num_threads()
