"""The codec of block quantisation: flat tensors to payload and scales, for collectives and for quantised states."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_precision.blocks import LARGEST_CODE, SMALLEST_BLOCK, BlockFormat, BlockQuantizer
from zero_precision.device_blocks import DeviceBlockQuantizer
from zero_precision.names import PrecisionError

_HALF_STEP: dict[str, float] = {"int8": 0.5, "int4": 0.5, "fp8_e4m3": 16.0, "fp8_e5m2": 4096.0}  # at the largest code
_FLOAT32_PRODUCTS = 2.0**-13  # relative to half a step: the float32 rounding of x * (L / m) and code * (m / L)


class BlockCodec:
    """Encode flat tensors as one byte or less per element plus one float32 scale per block.

    Satisfies zero-comm's `Codec`. Formats and the largest error per element, for a block of absolute maximum m:

    - `int8`: m / 254, `int4`: m / 14 (both half a step);
    - `fp8_e4m3`: 2^-4 of the element or m / 448 x 2^-10, `fp8_e5m2`: 2^-3 of the element or m / 57344 x 2^-17,
      whichever is larger;

    each plus 2^-13 of itself for float32 rounding, and the rounding of `out` where its dtype is narrower than float32.
    `error_bound` returns the largest one of each block. A block with m below 2^-100 decodes to zeros. A NaN decodes to
    NaN, an infinity to itself, and no element of their block to a finite number.

    Blocks are anchored at element 0. So shards are encoded one by one, and if their boundaries are multiples of
    `block`, their payloads and scales in a row are those of the full tensor.

    Args:
        format: one of the four above.
        block: elements per scale; a positive even number.
        quantizer: the implementation; None: `DeviceBlockQuantizer`.

    Raises `PrecisionError` for a wrong argument, and on `encode` / `decode` for tensors of the wrong shape or dtype.
    """

    def __init__(
        self, format: BlockFormat = "int8", *, block: int = 256, quantizer: BlockQuantizer | None = None
    ) -> None:
        if format not in LARGEST_CODE:
            known = ", ".join(LARGEST_CODE)
            raise PrecisionError(f"BlockCodec: expected a format out of {known}, got {format!r}")
        if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
            raise PrecisionError(f"BlockCodec: expected a positive even number of elements per block, got {block!r}")
        self.format = format
        self.block = block
        self._quantizer: BlockQuantizer = DeviceBlockQuantizer() if quantizer is None else quantizer

    def payload_nbytes(self, numel: int) -> int:
        """Return the number of bytes in the payload of `numel` elements: one each, for `int4` one for two,
        rounded up.
        """
        return (numel + 1) // 2 if self.format == "int4" else numel

    def scales_numel(self, numel: int) -> int:
        """Return the number of float32 scales of `numel` elements: one for each block, also an incomplete one."""
        return -(-numel // self.block)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return payload (uint8, `payload_nbytes`) and scales (float32, `scales_numel`) of the 1-D floating `x`, as new
        tensors on its device. Raises `PrecisionError` for another `x`.
        """
        if x.dim() != 1 or not x.is_floating_point():
            raise PrecisionError(f"BlockCodec.encode: expected a 1-D floating tensor, got {tuple(x.shape)} {x.dtype}")
        return self._quantizer.quantize_blocks(x.detach().contiguous(), self.format, self.block)

    def decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Decode (`payload`, `scales`) of `out.numel()` elements into `out` (contiguous, 1-D, floating), all on one
        device. Raises `PrecisionError` if sizes or dtypes do not fit.
        """
        self._check_decode(payload, scales, out)
        self._quantizer.dequantize_blocks(payload, scales, out, self.format, self.block)

    def error_bound(self, scales: Tensor) -> Tensor:
        """Return an upper bound of |decoded - original| for each block, in float32, from the blocks' scales.

        It is infinite for blocks that hold a NaN or an infinity, and does not count the rounding to a narrower `out`.
        """
        bound = scales * (_HALF_STEP[self.format] * (1.0 + _FLOAT32_PRODUCTS))
        return torch.where(scales == 0, SMALLEST_BLOCK, bound)

    def _check_decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Raise `PrecisionError` unless `out` is contiguous, 1-D and floating, and `payload` and `scales` have the
        dtypes and sizes that its number of elements requires."""
        if out.dim() != 1 or not out.is_floating_point() or not out.is_contiguous():
            raise PrecisionError(
                f"BlockCodec.decode: expected a contiguous 1-D floating `out`, got {tuple(out.shape)} {out.dtype}"
            )
        expected = (self.payload_nbytes(out.numel()), self.scales_numel(out.numel()))
        got = (payload.numel(), scales.numel())
        if got != expected or payload.dtype != torch.uint8 or scales.dtype != torch.float32:
            raise PrecisionError(
                f"BlockCodec.decode: {out.numel()} elements of {self.format} in blocks of {self.block} are "
                f"{expected[0]} uint8 and {expected[1]} float32 scales, got {got[0]} {payload.dtype} and {got[1]} "
                f"{scales.dtype}; were both sides built with the same format and block?"
            )
