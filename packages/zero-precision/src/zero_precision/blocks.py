"""The arithmetic of block codecs: its definition, and an implementation in plain torch."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

BlockFormat = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2"]
"""The codes of a block: 8-bit or 4-bit integers, or one of the 8-bit floating-point formats."""

LARGEST_CODE: dict[str, float] = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
SMALLEST_BLOCK = 2.0**-100
"""A block whose largest magnitude is below this is encoded as zeros."""

_FP8_DTYPES: dict[str, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class BlockQuantizer(Protocol):
    """Symmetric quantisation of a contiguous 1-D tensor in blocks anchored at its element 0.

    Codes are one byte each, for `int4` half a byte (element 2i in the low half of byte i, element 2i + 1 in the high
    half): two's complement for the integers, the bits of torch's dtype for fp8. With the largest code L (127, 7, 448,
    57344), a block of absolute maximum m has the scale m / L and the codes x * (L / m), rounded to the nearest, ties
    to even, all in float32. A block with m below 2^-100 has the scale 0 and the codes 0. A block that holds a NaN or an
    infinity has the scale infinity, the codes 1 and -1 for its infinities, and 0 elsewhere: infinities survive with
    their sign, all other elements of the block become NaN, and no overflow is hidden.
    """

    def quantize_blocks(self, x: Tensor, format: BlockFormat, block: int) -> tuple[Tensor, Tensor]:
        """Return the payload and the scales of the contiguous 1-D floating tensor `x`, on its device.

        The payload is uint8: one byte per element, for `int4` one per two. Scales are float32, ceil(numel / block): one
        for every `block` elements.
        """

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: BlockFormat, block: int) -> None:
        """Write code x scale for every element into `out` (contiguous, 1-D, floating, of the length of the encoded
        tensor). `payload` and `scales` are what `quantize_blocks` returned for the same `format` and `block`."""


class TorchBlockQuantizer:
    """`BlockQuantizer` in plain torch, on any device: the reference for the kernels."""

    def quantize_blocks(self, x: Tensor, format: BlockFormat, block: int) -> tuple[Tensor, Tensor]:
        """Return the payload (uint8) and the scales (float32) of the 1-D tensor `x`, as new tensors on its device:
        codes in `format`, one scale for every `block` elements.

        `block` is even for ``int4``; the last block may be shorter. The payload has one byte per element, for ``int4``
        one per two elements, rounded up."""
        limit = LARGEST_CODE[format]
        rows, scales = _scaled_rows(x, block, limit)
        rows.clamp_(-limit, limit)
        if format in _FP8_DTYPES:
            return rows.to(_FP8_DTYPES[format]).view(-1)[: x.numel()].view(torch.uint8), scales
        codes = rows.round_().to(torch.int8).view(-1).view(torch.uint8)
        return (codes[: x.numel()] if format == "int8" else _pack_nibbles(codes)[: (x.numel() + 1) // 2]), scales

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: BlockFormat, block: int) -> None:
        """Write the elements decoded from `payload` and `scales`, which were encoded with the same `format` and
        `block`, into the 1-D tensor `out`."""
        codes = _unpack_nibbles(payload, out.numel()) if format == "int4" else payload
        values = codes.view(_FP8_DTYPES.get(format, torch.int8)).to(torch.float32)
        whole = out.numel() // block * block
        values[:whole].view(-1, block).mul_(scales[: whole // block].unsqueeze(1))
        values[whole:].mul_(scales[whole // block :])
        out.copy_(values)


def _scaled_rows(x: Tensor, block: int, limit: float) -> tuple[Tensor, Tensor]:
    """Return (rows, scales): `x` divided by its blocks' scales, as float32 rows of `block` elements, the last one
    padded with zeros; and the scale of each block, infinite for one with NaN or infinities.

    ``limit``: the largest code. The row of a block with NaN or infinities has the codes 1 and -1 for its infinities and
    zeros elsewhere; that of a block whose maximum is below 2^-100 has zeros."""
    padded = x.new_zeros(-(-x.numel() // block) * block, dtype=torch.float32)
    padded[: x.numel()].copy_(x)
    rows = padded.view(-1, block)
    largest = rows.abs().amax(dim=1) if rows.numel() else rows.new_zeros(0)
    poisoned, empty = ~largest.isfinite(), largest < SMALLEST_BLOCK
    limits = torch.full_like(largest, limit)  # a number beside a tensor would be divided by way of a reciprocal
    scales = torch.where(poisoned, torch.inf, torch.where(empty, 0.0, largest / limits))
    scaled = torch.where(empty.unsqueeze(1), 0.0, rows * (limits / largest).unsqueeze(1))
    infinities = torch.where(rows.isinf(), rows.sign(), 0.0)
    return torch.where(poisoned.unsqueeze(1), infinities, scaled), scales


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Return an even number of `int4` codes, given one per byte (uint8), as two per byte: the element of even index in
    the low half."""
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] & 0x0F) | (pairs[:, 1] << 4)


def _unpack_nibbles(payload: Tensor, numel: int) -> Tensor:
    """Return the first `numel` codes of `payload`, two per byte, as one per byte, sign-extended and viewed as uint8:
    the inverse of `_pack_nibbles`."""
    signed = payload.view(torch.int8)
    low = (signed << 4) >> 4
    high = signed >> 4
    return torch.stack((low, high), dim=1).view(-1)[:numel].contiguous().view(torch.uint8)
