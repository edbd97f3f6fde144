"""Block quantisation of flat tensors, for the wire and for quantised states."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from zero_precision.dtypes import PrecisionError

BlockFormat = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2"]

_LARGEST_CODE: dict[str, float] = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_HALF_STEP: dict[str, float] = {"int8": 0.5, "int4": 0.5, "fp8_e4m3": 16.0, "fp8_e5m2": 4096.0}  # at the largest code
_FP8_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_SMALLEST_BLOCK = 2.0**-100
_FLOAT32_PRODUCTS = 2.0**-13  # what rounding x * (L / m) and code * (m / L) adds to half a step, relatively


class BlockQuantizer(Protocol):
    """Symmetric quantisation of a contiguous 1-D tensor in blocks anchored at its element 0.

    Codes are one byte each, for `int4` half a byte (element 2i in the low half of byte i, element 2i + 1 in the high
    half): two's complement for the integers, the bits of torch's dtype for fp8. With the largest code L (127, 7, 448,
    57344), a block of absolute maximum m has the scale m / L and the codes x * (L / m), rounded to the nearest, ties
    to even, all in float32. A block below 2^-100 is zero: its scale and codes are 0. A block that holds a NaN or an
    infinity has the scale infinity, the codes 1 and -1 where an infinity is, and 0 elsewhere: infinities survive with
    their sign, all else of that block becomes NaN, and no overflow is hidden.
    """

    def quantize_blocks(self, x: Tensor, format: BlockFormat, block: int) -> tuple[Tensor, Tensor]:
        """Return payload (uint8, one byte for each code or two) and scales (float32, ceil(numel / block))."""

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: BlockFormat, block: int) -> None:
        """Write code x scale into `out` (1-D, floating, of the original length)."""


class TorchBlockQuantizer:
    """`BlockQuantizer` in plain torch, on any device: the default, and the reference for kernels."""

    def quantize_blocks(self, x: Tensor, format: BlockFormat, block: int) -> tuple[Tensor, Tensor]:
        """Return payload (uint8) and scales (float32) of the 1-D tensor `x`."""
        limit = _LARGEST_CODE[format]
        rows, scales = _scaled_rows(x, block, limit)
        rows.clamp_(-limit, limit)
        if format in _FP8_DTYPES:
            return rows.to(_FP8_DTYPES[format]).view(-1)[: x.numel()].view(torch.uint8), scales
        codes = rows.round_().to(torch.int8).view(-1).view(torch.uint8)
        return (codes[: x.numel()] if format == "int8" else _pack_nibbles(codes)[: (x.numel() + 1) // 2]), scales

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: BlockFormat, block: int) -> None:
        """Write the decoded elements into the 1-D tensor `out`."""
        codes = _unpack_nibbles(payload, out.numel()) if format == "int4" else payload
        values = codes.view(_FP8_DTYPES.get(format, torch.int8)).to(torch.float32)
        whole = out.numel() // block * block
        values[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
        values[whole:].mul_(scales[whole // block :])
        out.copy_(values)


class BlockCodec:
    """Encode flat tensors as one byte or less per element plus one float32 scale per block.

    Satisfies zero-comm's `Codec`. Formats and the largest error per element, for a block of absolute maximum m:

    - `int8`: m / 254, `int4`: m / 14 (both half a step);
    - `fp8_e4m3`: 2^-4 of the element or m / 448 x 2^-10, `fp8_e5m2`: 2^-3 of the element or m / 57344 x 2^-17,
      whichever is larger;

    each plus 2^-13 of itself for float32 rounding, and the rounding of `out` where its dtype is narrower than float32.
    `error_bound` has the same for a whole block. A block below 2^-100 decodes to zeros. NaN and infinities survive,
    and of a block that holds one nothing decodes to a finite number.

    Blocks are anchored at element 0, so an encoder is applied to whole shards, and shards whose boundaries are
    multiples of `block` encode to the bytes of the whole.

    Args:
        format: one of the four above.
        block: elements per scale; a positive even number.
        quantizer: the implementation, plain torch unless given.

    Raises `PrecisionError` for a wrong argument, and on `encode` / `decode` for tensors of the wrong shape or dtype.
    """

    def __init__(
        self, format: BlockFormat = "int8", *, block: int = 256, quantizer: BlockQuantizer | None = None
    ) -> None:
        if format not in _LARGEST_CODE:
            known = ", ".join(_LARGEST_CODE)
            raise PrecisionError(f"BlockCodec: expected a format out of {known}, got {format!r}")
        if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
            raise PrecisionError(f"BlockCodec: expected a positive even number of elements per block, got {block!r}")
        self.format = format
        self.block = block
        self._quantizer: BlockQuantizer = TorchBlockQuantizer() if quantizer is None else quantizer

    def payload_nbytes(self, numel: int) -> int:
        """Return the bytes of the payload of `numel` elements."""
        return (numel + 1) // 2 if self.format == "int4" else numel

    def scales_numel(self, numel: int) -> int:
        """Return how many float32 scales `numel` elements have."""
        return -(-numel // self.block)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return payload (uint8, `payload_nbytes`) and scales (float32, `scales_numel`) of the 1-D floating `x`."""
        if x.dim() != 1 or not x.is_floating_point():
            raise PrecisionError(f"BlockCodec.encode: expected a 1-D floating tensor, got {tuple(x.shape)} {x.dtype}")
        return self._quantizer.quantize_blocks(x.detach().contiguous(), self.format, self.block)

    def decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the elements of (`payload`, `scales`) into `out`, 1-D and floating, whose length says how many."""
        self._check_decode(payload, scales, out)
        self._quantizer.dequantize_blocks(payload, scales, out, self.format, self.block)

    def error_bound(self, scales: Tensor) -> Tensor:
        """Return, for each block's scale, the largest |decoded - encoded| of its elements in float32; infinity for
        blocks that hold a NaN or an infinity."""
        bound = scales * (_HALF_STEP[self.format] * (1.0 + _FLOAT32_PRODUCTS))
        return torch.where(scales == 0, _SMALLEST_BLOCK, bound)

    def _check_decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
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


def _scaled_rows(x: Tensor, block: int, limit: float) -> tuple[Tensor, Tensor]:
    """Return x / scale as float32 rows of `block` elements (the tail padded with zeros), and the scales."""
    padded = x.new_zeros(-(-x.numel() // block) * block, dtype=torch.float32)
    padded[: x.numel()].copy_(x)
    rows = padded.view(-1, block)
    largest = rows.abs().amax(dim=1) if rows.numel() else rows.new_zeros(0)
    poisoned, empty = ~largest.isfinite(), largest < _SMALLEST_BLOCK
    limits = torch.full_like(largest, limit)  # a number beside a tensor would be divided by way of a reciprocal
    scales = torch.where(poisoned, torch.inf, torch.where(empty, 0.0, largest / limits))
    scaled = torch.where(empty.unsqueeze(1), 0.0, rows * (limits / largest).unsqueeze(1))
    infinities = torch.where(rows.isinf(), rows.sign(), 0.0)
    return torch.where(poisoned.unsqueeze(1), infinities, scaled), scales


def _pack_nibbles(codes: Tensor) -> Tensor:
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] & 0x0F) | (pairs[:, 1] << 4)


def _unpack_nibbles(payload: Tensor, numel: int) -> Tensor:
    signed = payload.view(torch.int8)
    low = (signed << 4) >> 4
    high = signed >> 4
    return torch.stack((low, high), dim=1).view(-1)[:numel].contiguous().view(torch.uint8)
