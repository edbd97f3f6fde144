"""Block quantisation in NumPy: decode a code by its definition, encode a value by a search for the nearest code."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..blocks import Code
from .rounding import Stream, random_bits

__all__ = ["decode_e4m3", "decode_u5e3", "dequantize", "quantize"]

Single = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

# What the largest magnitude of a block is mapped to; for u5e3 a little below its last code, 1.875, so that rounding
# errors do not pass it.
_LARGEST = {
    "int8": np.float32(127),
    "int4": np.float32(7),
    "e4m3": np.float32(448),
    "u5e3": np.float32(1.875) * np.float32(1 - 2.0**-22),
}
_ONE = {"int8": 0x01, "int4": 0x01, "e4m3": 0x38, "u5e3": 0x38}  # the code in blocks with NaN or Inf


def decode_e4m3(code: int) -> float:
    """Return the value of an e4m3 code: sign, 4 exponent bits with bias 7, 3 mantissa bits, subnormal numbers.

    0x7f, NaN in other definitions, never occurs.
    """
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 0x7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1.0 + mantissa / 8.0) * 2.0 ** (exponent - 7)


def decode_u5e3(code: int) -> float:
    """Return the value of a u5e3 code: 5 exponent bits with bias 31, 3 mantissa bits, no zero."""
    return (1.0 + (code & 7) / 8.0) * 2.0 ** ((code >> 3) - 31)


_E4M3 = np.array([decode_e4m3(code) for code in range(256)])
_U5E3 = np.array([decode_u5e3(code) for code in range(256)])


def _integer_codes(t: Single, most: int, random: npt.NDArray[np.uint32] | None) -> npt.NDArray[np.int64]:
    """Return the integers nearest to ``t``, ties to even, limited to magnitudes up to ``most``.

    ``random``: 32 bits per element, for stochastic rounding: noise within (-1/2, 1/2) is added first. None rounds to
    nearest.
    """
    if random is not None:
        noise = ((random >> np.uint32(16)) - 32767.5) / 65536
        t = t + noise.astype(np.float32)
    return np.clip(np.rint(t), -most, most).astype(np.int64)


def _float_codes(
    magnitude: npt.NDArray[np.float64], table: npt.NDArray[np.float64], random: npt.NDArray[np.uint32] | None
) -> npt.NDArray[np.int64]:
    """Return the index of the value in an increasing ``table`` that is nearest to each magnitude, ties to the even
    index; magnitudes beyond the table get its ends.

    ``random``: 32 bits per element, for stochastic rounding: to the upper neighbour with the probability ``(magnitude -
    lower) / (upper - lower)``, a multiple of 2^-20. None rounds to nearest.
    """
    lower = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, table.size - 2)
    part = np.clip((magnitude - table[lower]) / (table[lower + 1] - table[lower]), 0, 1)
    if random is None:
        up = (part > 0.5) | ((part == 0.5) & (lower % 2 == 1))
    else:
        up = np.rint(part * 2**20) + (random >> np.uint32(12)) >= 2**20
    return np.asarray(lower + up, np.int64)


def _codes(t: Single, code: Code, random: npt.NDArray[np.uint32] | None) -> npt.NDArray[np.int64]:
    """Return the codes of ``t``, float32 elements divided by their block's scale, rounded to nearest, or with
    ``random`` (32 bits per element) stochastically. Integer codes may be negative, 8-bit floats are bit patterns.
    """
    wide = t.astype(np.float64)
    if code == "u5e3":
        return _float_codes(abs(wide), _U5E3, random)
    if code == "e4m3":
        return _float_codes(abs(wide), _E4M3[:0x7F], random) | np.where(np.signbit(wide), 0x80, 0)
    return _integer_codes(t, int(_LARGEST[code]), random)


def quantize(
    x: npt.ArrayLike,
    code: Code,
    block: int,
    *,
    stochastic: bool = False,
    seed: int = 0,
    step: int = 0,
    element_offset: int = 0,
    stream: Stream = "payload",
) -> tuple[Codes, Single]:
    """Return payload (uint8) and scales (float32) of float32 numbers (``"u5e3"``: not negative), ``block`` of which
    share a scale, as `quantize_blocks` writes them.

    ``stream``: the random numbers of stochastic rounding, separate for optimizer state and payloads. The other
    arguments are those of `quantize_blocks`.
    """
    single = np.asarray(x, np.float32)
    index = np.uint64(element_offset) + np.arange(single.size, dtype=np.uint64)
    random = random_bits(seed, step, stream, index) if stochastic else None
    codes = np.zeros(single.size, np.int64)
    scales = np.zeros(-(-single.size // block), np.float32)
    for number, begin in enumerate(range(0, single.size, block)):
        here = slice(begin, begin + block)
        largest = abs(single[here]).max()
        if not np.isfinite(largest):
            scales[number], codes[here] = largest, _ONE[code]
        elif largest >= 2.0 ** (-90 if code == "u5e3" else -100):
            scales[number] = largest / _LARGEST[code]
            t = single[here] * (_LARGEST[code] / largest)
            codes[here] = _codes(t, code, None if random is None else random[here])
    if code != "int4":
        return codes.astype(np.uint8), scales
    nibbles = np.pad(codes & 0xF, (0, codes.size % 2))
    return (nibbles[::2] | nibbles[1::2] << 4).astype(np.uint8), scales


def dequantize(payload: Codes, scales: Single, n: int, code: Code, block: int) -> Any:
    """Return the ``n`` float32 numbers that ``payload`` and ``scales`` encode, code times scale, as `quantize` returned
    them with the same ``code`` and ``block``."""
    if code == "int8":
        numbers = payload.astype(np.int8).astype(np.float32)
    elif code == "int4":
        nibbles = np.stack([payload & 0xF, payload >> 4], axis=1).ravel()[:n].astype(np.int64)
        numbers = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float32)
    else:
        numbers = (_E4M3 if code == "e4m3" else _U5E3)[payload].astype(np.float32)
    return numbers * np.repeat(scales, block)[:n]
