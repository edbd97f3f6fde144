"""Adapters from the native CPU kernels to the interfaces of zero-comm, zero-partition and zero-precision. Each computes
on tensors of other devices too, without the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

import zero_optim_kernels as kernels
from zero_comm import sum_slices_on_device
from zero_partition import GRID, grid_squares, norm_squared, storage_address
from zero_precision import BlockFormat, DeviceBlockQuantizer, TorchBlockQuantizer

_DTYPES: dict[torch.dtype, Literal["f64", "f32", "bf16", "f16"]] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
_NARROW: dict[torch.dtype, Literal["f32", "bf16", "f16"]] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
_CODES: dict[BlockFormat, Literal["int8", "int4", "e4m3"]] = {"int8": "int8", "int4": "int4", "fp8_e4m3": "e4m3"}
_SMALL = 1 << 14  # elements; below, one thread


class NativeSliceSum:
    """A `zero_comm.SliceSum` by the CPU kernel, or by `zero_comm.sum_slices_on_device`: adds up in a reduce-scatter."""

    def __call__(self, slices: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int, accumulate: bool) -> None:
        """Write the sum of ``slices`` divided by ``divisor`` to ``out``, or add it to ``out`` if ``accumulate``. They
        are summed in their order, in float32 (float64 for float64). ``out`` may be one of ``slices``."""
        if out.device.type != "cpu":
            sum_slices_on_device(slices, out, divisor=divisor, accumulate=accumulate)
            return
        mixed = slices[0].dtype != out.dtype
        aliased = mixed and storage_address(out) in map(storage_address, slices)
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
    """A `zero_partition.NormSquared` by the CPU kernel, or by torch: for the global gradient norm."""

    def __call__(self, x: torch.Tensor) -> float:
        """Return the sum of squares of ``x`` in float64, added in an order that depends on its length only."""
        if x.device.type != "cpu":
            return norm_squared(x)
        return kernels.l2_norm_squared(x.data_ptr(), x.numel(), dtype=_DTYPES[x.dtype], threads=_threads(x))


class NativeGridSquares:
    """A `zero_partition.GridSquares` by the CPU kernel, or by torch: for norms that any number of ranks sums alike."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the float64 sum of squares of each block of `zero_partition.GRID` elements of ``x``, all full, as
        torch does."""
        if x.device.type != "cpu":
            return grid_squares(x)
        found = torch.empty(x.numel() // GRID, dtype=torch.float64)
        kernels.l2_norms_squared(
            x.data_ptr(), found.data_ptr(), x.numel(), block=GRID, dtype=_DTYPES[x.dtype], threads=_threads(x)
        )
        return found


class NativeBlockQuantizer:
    """A `zero_precision.BlockQuantizer` by the CPU kernels, bitwise equal to plain torch, which encodes fp8_e5m2 and
    tensors with a NaN or an infinity; `DeviceBlockQuantizer` encodes tensors on other devices."""

    def __init__(self) -> None:
        self._torch = TorchBlockQuantizer()
        self._elsewhere = DeviceBlockQuantizer()

    def quantize_blocks(self, x: torch.Tensor, format: BlockFormat, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return payload (uint8; int4: two per byte) and scales (float32, one per ``block`` elements) of the 1-D
        ``x``."""
        if x.device.type != "cpu":
            return self._elsewhere.quantize_blocks(x, format, block)
        if format not in _CODES:
            return self._torch.quantize_blocks(x, format, block)
        numel, single = x.numel(), x.float() if x.dtype == torch.float64 else x
        payload = torch.empty((numel + 1) // 2 if format == "int4" else numel, dtype=torch.uint8)
        scales = torch.empty(-(-numel // block), dtype=torch.float32)
        kernels.quantize_blocks(
            single.data_ptr(),
            payload.data_ptr(),
            scales.data_ptr(),
            numel,
            code=_CODES[format],
            block=block,
            dtype=_NARROW[single.dtype],
            threads=_threads(x),
        )
        return (payload, scales) if bool(scales.isfinite().all()) else self._torch.quantize_blocks(x, format, block)

    def dequantize_blocks(
        self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, format: BlockFormat, block: int
    ) -> None:
        """Write code times scale for every element to the 1-D ``out``, from what `quantize_blocks` returned for the
        same format."""
        if out.device.type != "cpu":
            self._elsewhere.dequantize_blocks(payload, scales, out, format, block)
            return
        if format not in _CODES:
            self._torch.dequantize_blocks(payload, scales, out, format, block)
            return
        target = out.new_empty(out.numel(), dtype=torch.float32) if out.dtype == torch.float64 else out
        kernels.dequantize_blocks(
            payload.data_ptr(),
            scales.data_ptr(),
            target.data_ptr(),
            out.numel(),
            code=_CODES[format],
            block=block,
            dtype=_NARROW[target.dtype],
            threads=_threads(out),
        )
        if target is not out:
            out.copy_(target)

    def describe(self, device: torch.device) -> str:
        """Return the name of the implementation that encodes tensors on ``device``, for reports."""
        return "CPU kernels" if device.type == "cpu" else self._elsewhere.describe(device)


def _threads(x: torch.Tensor) -> int:
    """Return the number of threads for a kernel over ``x``: torch's, or 1 if ``x`` is small."""
    return 1 if x.numel() < _SMALL else torch.get_num_threads()
