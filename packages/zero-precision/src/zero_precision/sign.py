"""One bit per element, for what is sent with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_precision.dtypes import PrecisionError

# Eight bytes of 0 or 1, seen as one little-endian number, times _GATHER have their bits side by side in the top byte;
# a byte times _REPEAT is eight copies of it, of which _EACH keeps another bit in each.
_GATHER, _REPEAT, _EACH = 0x0102040810204080, 0x0101010101010101, -0x7FBFDFEFF7FBFDFF


class SignCodec:
    """Encode each element as its sign, and each block of elements as its mean magnitude.

    Satisfies zero-comm's `Codec`. A single element may be off by more than its own magnitude: it is the compressor of
    error-feedback methods (1-bit Adam, arXiv 2102.02888), which add what one message lost to the next. Of all codes
    +s and -s the mean magnitude s loses the least: a block x of n elements decodes with a squared error of
    |x|^2 - n s^2. Zero is positive. Nothing of a block that holds a NaN or an infinity decodes to a finite number.

    Element i is bit i % 8 of byte i // 8, 1 for negative; blocks are anchored at element 0.

    Args:
        block: elements per scale, a positive multiple of 8.

    Raises `PrecisionError` for another block, and for tensors that are not 1-D and floating.
    """

    def __init__(self, block: int = 512) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 8 or block % 8:
            raise PrecisionError(f"SignCodec: expected a positive multiple of 8 as block, got {block!r}")
        self.block = block

    def payload_nbytes(self, numel: int) -> int:
        """Return the bytes of the payload of `numel` elements."""
        return -(-numel // 8)

    def scales_numel(self, numel: int) -> int:
        """Return how many float32 scales `numel` elements have."""
        return -(-numel // self.block)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return payload (uint8) and scales (float32) of the 1-D floating `x`."""
        if x.dim() != 1 or not x.is_floating_point():
            raise PrecisionError(f"SignCodec.encode: expected a 1-D floating tensor, got {tuple(x.shape)} {x.dtype}")
        rows = torch.nn.functional.pad(x.detach().float(), (0, -x.numel() % self.block)).view(-1, self.block)
        scales = rows.abs().sum(1)
        scales[:-1].div_(self.block)
        scales[-1:].div_(x.numel() - (len(rows) - 1) * self.block)
        return _pack((rows < 0).view(-1)[: self.payload_nbytes(x.numel()) * 8]), scales

    def decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write plus or minus its block's scale for every element into `out` (1-D, floating, contiguous)."""
        expected = (self.payload_nbytes(out.numel()), self.scales_numel(out.numel()))
        if (payload.numel(), scales.numel()) != expected or out.dim() != 1 or not out.is_floating_point():
            raise PrecisionError(
                f"SignCodec.decode: a 1-D floating `out` of shape {tuple(out.shape)} in blocks of {self.block} needs "
                f"{expected[0]} bytes and {expected[1]} scales, got {payload.numel()} and {scales.numel()}"
            )
        values = _unpack(payload)[: out.numel()].to(torch.float32).mul_(-2.0).add_(1.0)
        whole = out.numel() // self.block * self.block
        values[:whole].view(-1, self.block).mul_(scales[: whole // self.block].unsqueeze(1))
        values[whole:].mul_(scales[whole // self.block :])
        out.copy_(values)


def _pack(flags: Tensor) -> Tensor:
    return (flags.view(torch.uint8).view(torch.int64) * _GATHER >> 56).to(torch.uint8)


def _unpack(payload: Tensor) -> Tensor:
    spread: Tensor = payload.to(torch.int64).mul_(_REPEAT).bitwise_and_(_EACH)
    return spread.view(torch.uint8) != 0
