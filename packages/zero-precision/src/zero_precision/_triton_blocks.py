"""Triton kernels of the block codecs, bitwise equal to `TorchBlockQuantizer`. Imports triton.

[Note: the same bits everywhere] Rounding to codes and to bfloat16 is integer arithmetic on the bits of a float32. The
compiler cannot fuse it with floating-point operations, and it also works in Triton's interpreter, whose own conversion
to bfloat16 truncates. The only floating-point operations are products, and divisions by `div_rn`, which rounds as IEEE
754 says. Denormal numbers never change a code: a block that small is encoded as zeros, and an element that small in a
block above 2^-100 rounds to zero. So it does not matter whether the hardware flushes denormal numbers to zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements that one program holds at a time


class _Format(NamedTuple):
    """How a format encodes numbers: as signed integers if ``mantissa`` is 0, else as bit patterns of an 8-bit float.

    ``limit``: the largest magnitude; ``largest``: the bits of its code without the sign; ``mantissa``: its bits;
    ``bias``: of the exponent; ``special``: the first bit pattern that is infinity or NaN. The last three are 0 for
    integers."""

    limit: float
    largest: int
    mantissa: int = 0
    bias: int = 0
    special: int = 0


_FORMATS = {
    "int8": _Format(127.0, 127),
    "int4": _Format(7.0, 7),
    "fp8_e4m3": _Format(448.0, 0x7E, mantissa=3, bias=7, special=0x7F),
    "fp8_e5m2": _Format(57344.0, 0x7B, mantissa=2, bias=15, special=0x7C),
}


@triton.jit
def _nearest_integer(bits, power: tl.constexpr):
    """Return 2^power times x, rounded to the nearest integer, ties to even, as int32. ``bits``: those of x, a float32
    >= 0. The result must be below 2^23."""
    shift = tl.maximum(tl.minimum(149 - power - (bits >> 23), 24), 0)  # leaves one binary digit after the point
    mantissa = (bits & 0x7FFFFF) | 0x800000
    halves = mantissa >> shift
    whole = halves >> 1
    beyond = (mantissa != (halves << shift)).to(tl.int32)
    return whole + (halves & (whole | beyond) & 1)


@triton.jit
def _codes(scaled, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the codes of ``scaled``, float32 elements divided by their block's scale, rounded to the nearest, ties to
    even, as int32.

    With MANTISSA 0 codes are integers from -LARGEST to LARGEST. Otherwise they are bit patterns of an 8-bit float, 0 to
    255, with MANTISSA bits of mantissa, exponent bias BIAS and the sign in bit 7; LARGEST limits the bits below the
    sign. ``scaled`` must be finite."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if MANTISSA == 0:
        code = tl.minimum(_nearest_integer(magnitude, 0), LARGEST)
        return tl.where(bits < 0, -code, code)
    else:
        subnormal = _nearest_integer(magnitude, BIAS - 1 + MANTISSA)
        dropped: tl.constexpr = 23 - MANTISSA
        rebased = magnitude - ((127 - BIAS) << 23)
        normal = (rebased + ((1 << (dropped - 1)) - 1) + ((rebased >> dropped) & 1)) >> dropped
        code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal), LARGEST)
        return tl.where(bits < 0, code | 0x80, code)


@triton.jit
def _encode(
    x,
    payload,
    scales,
    numel,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NIBBLES: tl.constexpr,
    LIMIT: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Write the payload and scales of ROWS blocks of ``x`` (``numel`` elements, BLOCK per block). One pass over the
    blocks finds their largest magnitudes, a second writes the codes.

    Each pass reads COLUMNS elements of all ROWS blocks at a time. NIBBLES: two codes per byte. LIMIT: the format's
    largest magnitude; LARGEST: the bits of its code, without the sign; MANTISSA, BIAS: the bits of mantissa and the
    exponent bias of an 8-bit float, 0 for integers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    largest = tl.zeros((ROWS,), tl.int32)
    for first in range(0, BLOCK, COLUMNS):
        place = row[:, None] * BLOCK + (first + column)[None, :]
        here = ((first + column)[None, :] < BLOCK) & (place < numel)
        bits = tl.load(x + place, mask=here, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, tl.max(bits & 0x7FFFFFFF, axis=1))
    poisoned = largest >= 0x7F800000
    empty = largest < (27 << 23)  # 2^-100
    divisor = tl.where(poisoned | empty, 0x3F800000, largest).to(tl.float32, bitcast=True)
    limit = tl.full((ROWS,), LIMIT, tl.float32)
    scale = tl.where(poisoned, float("inf"), tl.where(empty, 0.0, tl.div_rn(divisor, limit)))
    tl.store(scales + row, scale, mask=row * BLOCK < numel)
    factor = tl.div_rn(limit, divisor)
    one: tl.constexpr = (BIAS << MANTISSA) if MANTISSA else 1
    for first in range(0, BLOCK, COLUMNS):
        place = row[:, None] * BLOCK + (first + column)[None, :]
        here = ((first + column)[None, :] < BLOCK) & (place < numel)
        value = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        infinite = tl.where((bits & 0x7FFFFFFF) == 0x7F800000, tl.where(bits < 0, -1, 1), 0)
        if MANTISSA != 0:
            infinite = tl.where(infinite < 0, one | 0x80, infinite * one)
        finite = tl.where(poisoned[:, None], 0.0, value) * factor[:, None]
        code = tl.where(poisoned[:, None], infinite, _codes(finite, LARGEST, MANTISSA, BIAS))
        code = tl.where(empty[:, None], 0, code)
        if NIBBLES:
            low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
            pair = first // 2 + tl.arange(0, COLUMNS // 2)
            place = row[:, None] * (BLOCK // 2) + pair[None, :]
            here = (pair[None, :] < BLOCK // 2) & (2 * place < numel)
            code = (low & 0xF) | (high << 4)
        tl.store(payload + place, (code & 0xFF).to(tl.uint8), mask=here)


@triton.jit
def _decode(
    payload,
    scales,
    out,
    numel,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NIBBLES: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SPECIAL: tl.constexpr,
    BFLOAT16: tl.constexpr,
):
    """Write TILE elements of ``out`` (``numel`` in all): each code in ``payload`` times its block's scale.

    BLOCK elements share a scale. NIBBLES: two codes per byte. MANTISSA, BIAS: the bits of mantissa and the exponent
    bias of an 8-bit float, 0 for integers; SPECIAL: its first bit pattern that is infinity or NaN. BFLOAT16: ``out`` is
    bfloat16, viewed as int16."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = place < numel
    if NIBBLES:
        byte = tl.load(payload + (place >> 1), mask=here, other=0).to(tl.int32)
        nibble = (byte >> ((place & 1) * 4).to(tl.int32)) & 0xF
        number = ((nibble ^ 8) - 8).to(tl.float32)
    else:
        byte = tl.load(payload + place, mask=here, other=0).to(tl.int32)
        if MANTISSA == 0:
            number = ((byte ^ 0x80) - 0x80).to(tl.float32)
        else:
            code = byte & 0x7F
            rebase: tl.constexpr = (127 - BIAS) << 23
            bits = (code << (23 - MANTISSA)) + rebase
            bits = tl.where(code >= SPECIAL, bits + rebase, bits)
            normal = bits.to(tl.float32, bitcast=True)
            unit: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
            number = tl.where(code < (1 << MANTISSA), code.to(tl.float32) * unit, normal)
            number = (number.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True)
    scale = tl.load(scales + place // BLOCK, mask=here, other=0.0)
    value = number * scale
    if BFLOAT16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        tl.store(out + place, tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.int16), mask=here)
    else:
        tl.store(out + place, value.to(out.dtype.element_ty), mask=here)


class TritonBlockQuantizer:
    """`BlockQuantizer` by Triton, for tensors on a CUDA device, or on the CPU in Triton's interpreter."""

    def quantize_blocks(self, x: Tensor, format: str, block: int) -> tuple[Tensor, Tensor]:
        """Return the payload (uint8) and the scales (float32) of the contiguous 1-D tensor `x` as new tensors on its
        device: codes in `format`, one scale for every `block` elements (see `BlockQuantizer`). The host does not wait
        for the device."""
        limit, largest, mantissa, bias, _ = _FORMATS[format]
        nibbles = format == "int4"
        payload = x.new_empty((x.numel() + 1) // 2 if nibbles else x.numel(), dtype=torch.uint8)
        scales = x.new_empty(-(-x.numel() // block), dtype=torch.float32)
        if x.numel():
            columns = min(triton.next_power_of_2(block), _TILE)
            rows = _TILE // columns
            with torch.cuda.device_of(x):
                _encode[(triton.cdiv(scales.numel(), rows),)](
                    x,
                    payload,
                    scales,
                    x.numel(),
                    BLOCK=block,
                    ROWS=rows,
                    COLUMNS=columns,
                    NIBBLES=nibbles,
                    LIMIT=limit,
                    LARGEST=largest,
                    MANTISSA=mantissa,
                    BIAS=bias,
                    enable_fp_fusion=False,
                )
        return payload, scales

    def dequantize_blocks(self, payload: Tensor, scales: Tensor, out: Tensor, format: str, block: int) -> None:
        """Write the elements decoded from `payload` and `scales`, which were encoded with the same `format` and
        `block`, into the contiguous 1-D tensor `out`. The host does not wait for the device."""
        _, _, mantissa, bias, special = _FORMATS[format]
        brain = out.dtype == torch.bfloat16
        target = out.view(torch.int16) if brain else out
        if out.numel():
            with torch.cuda.device_of(out):
                _decode[(triton.cdiv(out.numel(), _TILE),)](
                    payload,
                    scales,
                    target,
                    out.numel(),
                    BLOCK=block,
                    TILE=_TILE,
                    NIBBLES=format == "int4",
                    MANTISSA=mantissa,
                    BIAS=bias,
                    SPECIAL=special,
                    BFLOAT16=brain,
                    enable_fp_fusion=False,
                )
