"""A codec of one bit per element, for averages with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_precision.names import PrecisionError

# The product of _GATHER and eight bytes of 0 or 1, read as a little-endian number, has their bits in its top byte. The
# product of _REPEAT and a byte is eight copies of the byte; _EACH masks another bit in each copy.
_GATHER, _REPEAT, _EACH = 0x0102040810204080, 0x0101010101010101, -0x7FBFDFEFF7FBFDFF


class SignCodec:
    """Encode each element as its sign, and each block of elements as its mean magnitude.

    Satisfies zero-comm's `Codec`. It is the compressor of error-feedback methods (1-bit Adam, arXiv 2102.02888), which
    add the error of one message to the next, as the error of an element can exceed its magnitude. Of all decodings to
    +s and -s, the mean magnitude s has the least squared error: |x|^2 - n s^2 for a block x of n elements. Zero counts
    as positive. No element of a block that holds a NaN or an infinity decodes to a finite number.

    Element i is bit i % 8 of byte i // 8, 1 for negative; blocks are anchored at element 0.

    Args:
        block: elements per scale, a positive multiple of 8.

    Raises `PrecisionError` for any other block size, and for tensors that are not 1-D and floating.
    """

    def __init__(self, block: int = 512) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 8 or block % 8:
            raise PrecisionError(f"SignCodec: expected a positive multiple of 8 as block, got {block!r}")
        self.block = block

    def payload_nbytes(self, numel: int) -> int:
        """Return the number of bytes in the payload of `numel` elements: a bit each, rounded up."""
        return -(-numel // 8)

    def scales_numel(self, numel: int) -> int:
        """Return the number of float32 scales of `numel` elements: one for each block, also an incomplete one."""
        return -(-numel // self.block)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return payload (uint8, `payload_nbytes`) and scales (float32, `scales_numel`) of the 1-D floating `x`, as new
        tensors on its device. Raises `PrecisionError` for another `x`."""
        if x.dim() != 1 or not x.is_floating_point():
            raise PrecisionError(f"SignCodec.encode: expected a 1-D floating tensor, got {tuple(x.shape)} {x.dtype}")
        rows = torch.nn.functional.pad(x.detach().float(), (0, -x.numel() % self.block)).view(-1, self.block)
        scales = rows.abs().sum(1)
        scales[:-1].div_(self.block)
        scales[-1:].div_(x.numel() - (len(rows) - 1) * self.block)
        return _pack_bits((rows < 0).view(-1)[: self.payload_nbytes(x.numel()) * 8]), scales

    def decode(self, payload: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the elements into `out` (1-D, floating): the scale of each element's block, with the element's sign.
        Raises `PrecisionError` if `payload` and `scales` are not those of `out.numel()` elements."""
        expected = (self.payload_nbytes(out.numel()), self.scales_numel(out.numel()))
        if (payload.numel(), scales.numel()) != expected or out.dim() != 1 or not out.is_floating_point():
            raise PrecisionError(
                f"SignCodec.decode: a 1-D floating `out` of shape {tuple(out.shape)} in blocks of {self.block} needs "
                f"{expected[0]} bytes and {expected[1]} scales, got {payload.numel()} and {scales.numel()}"
            )
        values = _unpack_bits(payload)[: out.numel()].to(torch.float32).mul_(-2.0).add_(1.0)
        whole = out.numel() // self.block * self.block
        values[:whole].view(-1, self.block).mul_(scales[: whole // self.block].unsqueeze(1))
        values[whole:].mul_(scales[whole // self.block :])
        out.copy_(values)


def _pack_bits(flags: Tensor) -> Tensor:
    """Return booleans, contiguous and a multiple of 8 in number, as uint8: flag i is bit i % 8 of byte i // 8."""
    return (flags.view(torch.uint8).view(torch.int64) * _GATHER >> 56).to(torch.uint8)


def _unpack_bits(payload: Tensor) -> Tensor:
    """Return the bits of every byte as booleans, eight per byte; the inverse of `_pack_bits`."""
    spread: Tensor = payload.to(torch.int64).mul_(_REPEAT).bitwise_and_(_EACH)
    return spread.view(torch.uint8) != 0
