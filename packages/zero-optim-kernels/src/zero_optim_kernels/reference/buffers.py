"""Norms, scans, scaling and sums of stored arrays (see `rounding`)."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .._types import Dtype
from .rounding import stored, values

__all__ = ["count_nonfinite", "l2_norm_squared", "l2_norms_squared", "scale", "sum_slices"]


def l2_norm_squared(x: npt.ArrayLike) -> float:
    """Return the sum of squares of all elements, exactly rounded to float64."""
    return math.fsum(value * value for value in np.asarray(x, np.float64).ravel().tolist())


def l2_norms_squared(x: npt.NDArray[Any], block: int) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each block of ``block`` elements of 1-D ``x``, in float64, added in the kernel's
    order.
    """
    found = []
    for start in range(0, x.size, block):
        part = x[start : start + block].astype(np.float64) ** 2
        rows = np.zeros((-(-part.size // 32), 32))
        rows.ravel()[: part.size] = part
        sums = functools.reduce(np.add, rows)
        while sums.size > 1:
            sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
        found.append(sums[0])
    return np.array(found, np.float64)


def count_nonfinite(x: npt.NDArray[Any], dtype: Dtype) -> int:
    """Return how many elements of an array stored in ``dtype`` are NaN or infinite."""
    return int(np.count_nonzero(~np.isfinite(values(x, dtype))))


def scale(x: npt.NDArray[Any], factor: float, dtype: Dtype) -> npt.NDArray[Any]:
    """Return ``x * factor`` for an array stored in ``dtype``: computed in float64 for float64, else in float32, and
    rounded to ``dtype``.
    """
    wide = values(x, dtype)
    return stored(wide * wide.dtype.type(factor), dtype)


def sum_slices(slices: list[npt.NDArray[Any]], dtype: Dtype, out_dtype: Dtype, divisor: float) -> npt.NDArray[Any]:
    """Return the sum of the slices, stored in ``dtype``, over ``divisor``, rounded to ``out_dtype``.

    Slices are added in order in float32 (float64 for float64 slices), and divided once.
    """
    wide = [values(part, dtype) for part in slices]
    total = wide[0]
    for part in wide[1:]:
        total = total + part
    quotient = total / total.dtype.type(divisor)
    return stored(quotient if out_dtype == "f64" else quotient.astype(np.float32), out_dtype)
