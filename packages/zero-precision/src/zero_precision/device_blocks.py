"""Choose the implementation of the block codecs by device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zero_precision.blocks import BlockFormat, BlockQuantizer, TorchBlockQuantizer


class DeviceBlockQuantizer:
    """`BlockQuantizer` for tensors on any device: Triton kernels on CUDA devices, plain torch elsewhere.

    torch's CUDA builds include triton, which is imported at the first CUDA tensor. Where the import fails, CUDA tensors
    use plain torch too. Results are bitwise equal; `describe` says which implementation is in use.
    """

    def __init__(self) -> None:
        self._torch = TorchBlockQuantizer()

    def quantize_blocks(self, x: Tensor, format: BlockFormat, block: int) -> tuple[Tensor, Tensor]:
        """Return the payload (uint8) and the scales (float32) of the contiguous 1-D tensor `x` as new tensors on its
        device: codes in `format`, one scale for every `block` elements (see `BlockQuantizer`)."""
        return self._for_device(x.device).quantize_blocks(x, format, block)

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: BlockFormat, block: int) -> None:
        """Write the elements decoded from `payload` and `scales`, which were encoded with the same `format` and
        `block`, into the contiguous 1-D tensor `out`."""
        self._for_device(out.device).dequantize_blocks(payload, scales, out, format, block)

    def describe(self, device: torch.device) -> str:
        """Return the name of the implementation that tensors on `device` use, as text for people; on CUDA without
        Triton also the reason."""
        if device.type != "cuda":
            return "plain torch"
        _, said = _triton_quantizer()
        return said

    def _for_device(self, device: torch.device) -> BlockQuantizer:
        """Return the quantizer for tensors on `device`: Triton's on CUDA if triton can be imported, else the one in
        plain torch."""
        if device.type != "cuda":
            return self._torch
        kernels, _ = _triton_quantizer()
        return kernels or self._torch


@functools.cache
def _triton_quantizer() -> tuple[BlockQuantizer | None, str]:
    """Return (quantizer, description): Triton's quantizer, or None where triton cannot be imported, and text for people
    that says which implementation is used and why. Cached."""
    try:
        import triton

        from zero_precision._triton_blocks import TritonBlockQuantizer
    except ImportError as error:
        return None, f"plain torch, because triton cannot be imported ({error})"
    return TritonBlockQuantizer(), f"triton {triton.__version__}"
