"""Block quantisation of flat tensors, for the wire and for quantised states."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from zero_precision.dtypes import PrecisionError

BlockFormat = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2"]

_INTEGER_BITS: dict[str, int] = {"int8": 8, "int4": 4}
_SMALLEST_BLOCK = 2.0**-100
_FP8_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class BlockQuantizer(Protocol):
    """Symmetric integer quantisation of a contiguous 1-D tensor in blocks anchored at its element 0.

    `bits` is 8 (one code per byte, two's complement) or 4 (element 2i in the low half of byte i, element 2i + 1 in the
    high half, two's complement). With L = 2^(bits-1) - 1, a block of absolute maximum m has the scale m / L and the
    codes x * (L / m), rounded to the nearest, ties to even, all in float32. A block below 2^-100 is zero: its scale and
    codes are 0. A block that holds a NaN or an infinity has that as its scale and codes of 1, so that none of it
    decodes to a finite number and no overflow is hidden.
    """

    def quantize_blocks(self, x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
        """Return payload (uint8, ceil(numel * bits / 8)) and scales (float32, ceil(numel / block))."""

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, bits: int, block: int) -> None:
        """Write code x scale into `out` (1-D, floating, of the original length)."""


class TorchBlockQuantizer:
    """`BlockQuantizer` in plain torch, on any device: the default, and the reference for kernels."""

    def quantize_blocks(self, x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
        """Return payload (uint8) and scales (float32) of the 1-D tensor `x`."""
        limit = float(2 ** (bits - 1) - 1)
        rows, scales = _scaled_rows(x, block, limit)
        codes = rows.round_().clamp_(-limit, limit).to(torch.int8).view(-1).view(torch.uint8)
        return (codes[: x.numel()] if bits == 8 else _pack_nibbles(codes)[: (x.numel() + 1) // 2]), scales

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, bits: int, block: int) -> None:
        """Write the decoded elements into the 1-D tensor `out`."""
        codes = payload if bits == 8 else _unpack_nibbles(payload, out.numel())
        _write_scaled(codes.view(torch.int8), scales, out, block)


class BlockCodec:
    """Encode flat tensors as one byte or less per element plus one float32 scale per block.

    Satisfies zero-comm's `Codec`. Formats and the largest error per element, for a block of absolute maximum m:

    - `int8`: m / 254, `int4`: m / 14 (both half a step, plus float32 rounding);
    - `fp8_e4m3`: 2^-4 of the element or m / 448 x 2^-10, `fp8_e5m2`: 2^-3 of the element or m / 57344 x 2^-17,
      whichever is larger.

    Blocks are anchored at element 0, so an encoder is applied to whole shards, and shards whose boundaries are
    multiples of `block` encode to the bytes of the whole. A block below 2^-100 decodes to zeros; of a block that holds
    a NaN or an infinity nothing decodes to a finite number. `quantizer` serves the integer formats; fp8 uses torch's
    own casts.

    Args:
        format: one of the four above.
        block: elements per scale; a positive even number.
        quantizer: the implementation of the integer formats, plain torch unless given.

    Raises `PrecisionError` for a wrong argument, and on `encode` / `decode` for tensors of the wrong shape or dtype.
    """

    def __init__(
        self, format: BlockFormat = "int8", *, block: int = 256, quantizer: BlockQuantizer | None = None
    ) -> None:
        if format not in _INTEGER_BITS and format not in _FP8_DTYPES:
            known = ", ".join((*_INTEGER_BITS, *_FP8_DTYPES))
            raise PrecisionError(f"BlockCodec: expected a format out of {known}, got {format!r}")
        if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
            raise PrecisionError(f"BlockCodec: expected a positive even number of elements per block, got {block!r}")
        self.format = format
        self.block = block
        self._quantizer: BlockQuantizer = TorchBlockQuantizer() if quantizer is None else quantizer

    def payload_nbytes(self, numel: int) -> int:
        """Return the bytes of the payload of `numel` elements."""
        return (numel * _INTEGER_BITS.get(self.format, 8) + 7) // 8

    def scales_numel(self, numel: int) -> int:
        """Return how many float32 scales `numel` elements have."""
        return -(-numel // self.block)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return payload (uint8, `payload_nbytes`) and scales (float32, `scales_numel`) of the 1-D floating `x`."""
        if x.dim() != 1 or not x.is_floating_point():
            raise PrecisionError(f"BlockCodec.encode: expected a 1-D floating tensor, got {tuple(x.shape)} {x.dtype}")
        x = x.detach().contiguous()
        if self.format in _INTEGER_BITS:
            return self._quantizer.quantize_blocks(x, _INTEGER_BITS[self.format], self.block)
        dtype = _FP8_DTYPES[self.format]
        limit = torch.finfo(dtype).max
        rows, scales = _scaled_rows(x, self.block, limit)
        return rows.clamp_(-limit, limit).to(dtype).view(-1)[: x.numel()].view(torch.uint8), scales

    def decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the elements of (`payload`, `scales`) into `out`, 1-D and floating, whose length says how many."""
        self._check_decode(payload, scales, out)
        if self.format in _INTEGER_BITS:
            self._quantizer.dequantize_blocks(payload, scales, out, _INTEGER_BITS[self.format], self.block)
        else:
            _write_scaled(payload.view(_FP8_DTYPES[self.format]), scales, out, self.block)

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
    scales = torch.where(poisoned, largest, torch.where(empty, 0.0, largest / limit))
    rows = rows * torch.where(empty, 0.0, limit / largest).unsqueeze(1)
    return torch.where(poisoned.unsqueeze(1), 1.0, rows), scales


def _write_scaled(codes: Tensor, scales: Tensor, out: Tensor, block: int) -> None:
    whole = out.numel() // block * block
    values = codes.to(torch.float32)
    values[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
    values[whole:].mul_(scales[whole // block :])
    out.copy_(values)


def _pack_nibbles(codes: Tensor) -> Tensor:
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] & 0x0F) | (pairs[:, 1] << 4)


def _unpack_nibbles(payload: Tensor, numel: int) -> Tensor:
    signed = payload.view(torch.int8)
    low = (signed << 4) >> 4
    high = signed >> 4
    return torch.stack((low, high), dim=1).view(-1)[:numel].contiguous().view(torch.uint8)
