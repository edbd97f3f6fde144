"""The kernels once more, slow and obvious, in NumPy: the oracle of the tests. Nothing else in this package needs NumPy.

`steps` has the rules, `rounding` the 16-bit formats and the random numbers, `blocks` the quantisation, `buffers` the
rest. Steps return what exact arithmetic gives, which kernels approximate; everything else is bitwise equal to what the
kernels write.
"""

from __future__ import annotations

from .blocks import decode_e4m3, decode_u5e3, dequantize, quantize
from .buffers import count_nonfinite, l2_norm_squared, l2_norms_squared, scale, sum_slices
from .rounding import (
    bf16_join,
    bf16_nearest,
    bf16_split,
    bf16_stochastic,
    bf16_values,
    cast,
    random_bits,
    stored,
    values,
)
from .steps import Result, adagrad, adam, lamb, lion, sgd

__all__ = [
    "Result",
    "adagrad",
    "adam",
    "bf16_join",
    "bf16_nearest",
    "bf16_split",
    "bf16_stochastic",
    "bf16_values",
    "cast",
    "count_nonfinite",
    "decode_e4m3",
    "decode_u5e3",
    "dequantize",
    "l2_norm_squared",
    "l2_norms_squared",
    "lamb",
    "lion",
    "quantize",
    "random_bits",
    "scale",
    "sgd",
    "stored",
    "sum_slices",
    "values",
]
