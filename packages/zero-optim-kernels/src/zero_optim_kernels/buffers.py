"""Kernels over plain buffers: norms, scans, scaling, casts and the sum of slices.

Operands are integer addresses or contiguous buffers; ``n`` counts elements; dtypes are ``"f32"``, ``"bf16"``,
``"f16"`` and ``"f64"``. Where ``x`` is a list of operands, ``n`` is the list of their lengths. Results are bitwise
equal on every instruction set and for every number of threads (``threads=0``: `default_threads`). All functions release
the GIL, and raise ``TypeError`` or ``ValueError`` before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._calls import kernels
from ._types import Count, Dtype, Operand, Operands

__all__ = [
    "cast",
    "count_nonfinite",
    "digests",
    "l2_norm",
    "l2_norm_squared",
    "l2_norms_squared",
    "scale",
    "sum_slices",
]


def l2_norm_squared(x: Operands, n: Count, *, dtype: Dtype = "f32", threads: int = 0) -> float:
    """Return the sum of squares of the ``n`` elements of ``x``, accumulated in float64 in an order that depends on
    ``n`` only.

    For a list of operands it is the sum over all of them, in the order of the list. NaN and infinity propagate.
    """
    return kernels().norm_squared(x, n, dtype, threads)


def l2_norm(x: Operands, n: Count, *, dtype: Dtype = "f32", threads: int = 0) -> float:
    """Return the Euclidean norm of the ``n`` elements of ``x``: the square root of `l2_norm_squared`."""
    return math.sqrt(l2_norm_squared(x, n, dtype=dtype, threads=threads))


def l2_norms_squared(x: Operand, out: Operand, n: int, *, block: int, dtype: Dtype = "f32", threads: int = 0) -> None:
    """Write the sum of squares of each block of ``block`` elements to float64 ``out``; the last block may be shorter.

    ``out``: ceil(n / block) elements. ``block``: 1 to 65,536. Element i of a block is added, in float64, to sum i mod
    32, in the order of i; then the 32 sums are added in halves: sum i and sum i + 16, then i + 8, and so on.
    """
    kernels().norms_squared(x, out, n, block, dtype, threads)


def digests(x: Operand, out: Operand, n: int, *, block: int, threads: int = 0) -> None:
    """Write a 64-bit digest of each ``block`` of the ``n`` bytes of ``x`` to ``out``: ``ceil(n / block)`` items of 8
    bytes (an address, or a buffer of raw bytes), which depend on every byte and its place. A change of one byte always
    changes its block's digest, any other one with a probability of ``1 - 2**-64``; it is no protection against intent.

    ``threads=0`` uses `default_threads`. Raises ``TypeError`` or ``ValueError`` before anything is written.
    """
    kernels().digests(x, out, n, block, threads)


def count_nonfinite(x: Operands, n: Count, *, dtype: Dtype = "f32", threads: int = 0) -> int:
    """Return how many of the ``n`` elements of ``x`` (of all operands of a list together) are NaN or infinite."""
    return kernels().count_nonfinite(x, n, dtype, threads)


def scale(x: Operands, n: Count, factor: float, *, dtype: Dtype = "f32", threads: int = 0) -> None:
    """Multiply ``x`` by ``factor`` in place; 16-bit elements are multiplied in float32 and rounded to nearest even."""
    kernels().scale(x, n, factor, dtype, threads)


def cast(x: Operand, out: Operand, n: int, *, dtype: Dtype, out_dtype: Dtype, threads: int = 0) -> None:
    """Convert ``n`` elements of ``x`` to ``out_dtype`` and write them to ``out``, rounded to nearest even.

    NaN stays NaN. float64 is rounded to float32 before it is rounded to 16 bits. ``x`` and ``out`` must not overlap
    unless the dtypes are equal.
    """
    kernels().cast(x, out, n, dtype, out_dtype, threads)


def sum_slices(
    slices: Sequence[Operand],
    out: Operand,
    n: int,
    *,
    dtype: Dtype,
    out_dtype: Dtype | None = None,
    divisor: float = 1.0,
    threads: int = 0,
) -> None:
    """Write the elementwise sum of ``slices`` (``n`` elements each), divided by ``divisor``, to ``out``.

    Slices are added in the order given and divided once. The accumulator is float32 (float64 for ``"f64"`` slices);
    ``divisor`` is rounded to the accumulator's dtype, and the quotient to nearest even in ``out_dtype`` (by default
    ``dtype``). ``out`` may be one of the slices when the two dtypes are equal.
    """
    kernels().sum_slices(slices, out, n, dtype, out_dtype or dtype, divisor, threads)
