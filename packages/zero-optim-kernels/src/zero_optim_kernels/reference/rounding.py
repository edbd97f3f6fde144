"""Storage dtypes, and the random numbers of stochastic rounding.

A stored array has dtype float32, float16 or float64; bf16, which NumPy lacks, is stored as uint16.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._types import Dtype

__all__ = [
    "Stream",
    "bf16_join",
    "bf16_nearest",
    "bf16_split",
    "bf16_stochastic",
    "bf16_values",
    "cast",
    "random_bits",
    "stored",
    "values",
]

Single = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]
Stream = Literal["parameter", "second_moment", "payload"]

_STREAMS: tuple[Stream, ...] = ("parameter", "second_moment", "payload")
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _bits(x: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return the 32 bits of float32 numbers as unsigned integers, widened to 64."""
    return np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)


def _keep_nan(x: npt.ArrayLike, rounded: npt.NDArray[np.uint64]) -> Bits16:
    """Return ``rounded``, the bf16 bits of the float32 numbers ``x``, as uint16. Where ``x`` is NaN, take the upper
    half of its bits instead, made a quiet NaN."""
    nan = (_bits(x) >> np.uint64(16)) | np.uint64(0x40)
    return np.where(np.isnan(np.asarray(x, np.float32)), nan, rounded).astype(np.uint16)


def bf16_nearest(x: npt.ArrayLike) -> Bits16:
    """Round float32 to the nearest bf16, ties to even; return its bits."""
    lower, rest = np.divmod(_bits(x), np.uint64(0x10000))
    up = (rest > 0x8000) | ((rest == 0x8000) & (lower % 2 == 1))
    return _keep_nan(x, lower + up.astype(np.uint64))


def bf16_stochastic(x: npt.ArrayLike, random: npt.NDArray[np.uint32]) -> Bits16:
    """Round float32 to one of the two bf16 neighbours at random, such that the expectation is ``x``; return its bits.

    ``random``: uniform in [0, 2^16), one per element.
    """
    return _keep_nan(x, (_bits(x) + random) >> np.uint64(16))


def bf16_values(bits: Bits16) -> Single:
    """Return the float32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_split(x: npt.ArrayLike) -> tuple[Bits16, Bits16]:
    """Split float32 into the bits of the nearest bf16 (ties away from zero) and the 16 low bits that `bf16_join` needs
    to restore it.
    """
    single = np.asarray(x, np.float32)
    bits = _bits(np.where(np.isnan(single), np.float32(np.nan), single))
    return ((bits + np.uint64(0x8000)) >> np.uint64(16)).astype(np.uint16), bits.astype(np.uint16)


def bf16_join(high: Bits16, low: Bits16) -> Single:
    """Return the float32 that `bf16_split` split: ``low``, as a signed integer, is the difference of its bits from
    those of the bf16 ``high``.
    """
    difference = low.view(np.int16).astype(np.int64)
    return ((high.astype(np.int64) << 16) + difference).astype(np.uint32).view(np.float32)


def stored(x: npt.ArrayLike, dtype: Dtype) -> npt.NDArray[Any]:
    """Return numbers as an array stored in ``dtype``, rounded to nearest even, for bf16 (stored as uint16) by way of
    float32; what is too large becomes infinite."""
    if dtype == "bf16":
        return bf16_nearest(x)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype({"f32": np.float32, "f16": np.float16, "f64": np.float64}[dtype])


def values(x: npt.NDArray[Any], dtype: Dtype) -> npt.NDArray[Any]:
    """Return the numbers of an array stored in ``dtype``: as float64 for float64, else as float32."""
    if dtype == "bf16":
        return bf16_values(x)
    return np.asarray(x, np.float32 if dtype == "f16" else x.dtype)


def cast(x: npt.NDArray[Any], dtype: Dtype, out_dtype: Dtype) -> npt.NDArray[Any]:
    """Return a copy of an array stored in ``dtype``, converted to ``out_dtype`` by rounding to nearest even; float64
    goes to 16 bits through float32.
    """
    if dtype == out_dtype:
        return np.array(x)
    wide = values(x, dtype)
    return stored(wide if out_dtype == "f64" else wide.astype(np.float32), out_dtype)


def _mix(x: int) -> int:
    """Return a 64-bit hash of a 64-bit integer: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014, figure
    16).
    """
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def random_bits(seed: int, step: int, stream: Stream, index: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Return 32 random bits for each global element index, fixed by ``seed``, ``step`` and ``stream`` (the use of the
    numbers); the high bits are the most random.

    Indices with the same high half share a key, with which their low half is hashed.
    """
    wide = np.asarray(index, np.uint64)
    call = _mix((_mix((seed + _GOLDEN) & _MASK64) + step) & _MASK64)
    result = np.zeros(wide.shape, np.uint32)
    for high in np.unique(wide >> np.uint64(32)):
        key = _mix((call + (int(high) * 4 + _STREAMS.index(stream)) * _GOLDEN) & _MASK64)
        here = wide >> np.uint64(32) == high
        x = (wide[here] + np.uint64(key & _MASK32)) * np.uint64(0x9E3779B1) & np.uint64(_MASK32)
        x = (x ^ x >> np.uint64(16) ^ np.uint64(key >> 32)) * np.uint64(0x85EBCA6B)
        result[here] = (x & np.uint64(_MASK32)).astype(np.uint32)
    return result
