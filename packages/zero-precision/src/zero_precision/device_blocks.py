"""Choose the implementation of the block codecs that serves a device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zero_precision.blocks import BlockFormat, BlockQuantizer, TorchBlockQuantizer


class DeviceBlockQuantizer:
    """`BlockQuantizer` for tensors on any device: Triton kernels on CUDA devices, plain torch elsewhere.

    torch's CUDA builds bring triton along; it is imported when the first CUDA tensor comes. Where it cannot be, plain
    torch serves CUDA too. The bits are the same either way, and `describe` says which it is.
    """

    def __init__(self) -> None:
        self._torch = TorchBlockQuantizer()

    def quantize_blocks(self, x: Tensor, format: BlockFormat, block: int) -> tuple[Tensor, Tensor]:
        """Return payload (uint8) and scales (float32) of the contiguous 1-D tensor `x`."""
        return self._serving(x.device).quantize_blocks(x, format, block)

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: BlockFormat, block: int) -> None:
        """Write the decoded elements into the 1-D tensor `out`."""
        self._serving(out.device).dequantize_blocks(payload, scales, out, format, block)

    def describe(self, device: torch.device) -> str:
        """Return in words what serves tensors on `device`, and why it is not Triton on a CUDA device."""
        if device.type != "cuda":
            return "plain torch"
        _, said = _kernels()
        return said

    def _serving(self, device: torch.device) -> BlockQuantizer:
        if device.type != "cuda":
            return self._torch
        kernels, _ = _kernels()
        return kernels or self._torch


@functools.cache
def _kernels() -> tuple[BlockQuantizer | None, str]:
    """Triton's quantizer, None where triton cannot be imported, and a line for people."""
    try:
        import triton

        from zero_precision._triton_blocks import TritonBlockQuantizer
    except ImportError as error:
        return None, f"plain torch, because triton cannot be imported ({error})"
    return TritonBlockQuantizer(), f"triton {triton.__version__}"
