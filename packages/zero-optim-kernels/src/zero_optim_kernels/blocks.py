"""Block quantisation of plain buffers, for collectives.

A block of ``block`` elements shares one float32 scale, its largest magnitude divided by the largest code; ``value =
code * scale``.

==========  ==============  =====================  ==============================================
code        largest code    payload bytes          layout
==========  ==============  =====================  ==============================================
``"int8"``  127             n                      two's complement
``"int4"``  7               ceil(n / 2)            two's complement nibbles, even element low
``"e4m3"``  448             n                      8-bit float, 4 exponent and 3 mantissa bits
``"u5e3"``  1.875           n                      unsigned, 5 exponent and 3 mantissa bits, for x >= 0
==========  ==============  =====================  ==============================================

With ``block=256``, ``"e4m3"`` and ``"u5e3"`` are the first and the second moment of ``state_dtype="int8"``. Code c of
``"u5e3"`` is ``2**(c // 8 - 31) * (1 + c % 8 / 8)``; an element of a block that is not zero never
decodes to zero.

The scale of a block that contains NaN or Inf is NaN or Inf, and so are all its decoded elements. A block whose largest
magnitude is below 2**-100 (``"u5e3"``: 2**-90) becomes zero.
"""

from __future__ import annotations

from typing import Literal

from . import _rules
from ._calls import kernels
from ._types import Dtype, Operand

__all__ = ["Code", "dequantize_blocks", "quantize_blocks"]

Code = Literal["int8", "int4", "e4m3", "u5e3"]


def quantize_blocks(
    x: Operand,
    payload: Operand,
    scales: Operand,
    n: int,
    *,
    code: Code = "int8",
    block: int = 2048,
    dtype: Dtype = "f32",
    stochastic: bool = False,
    seed: int = 0,
    step: int = 0,
    element_offset: int = 0,
    threads: int = 0,
) -> None:
    """Encode ``n`` elements of ``x`` (``dtype`` ``"f32"``, ``"bf16"`` or ``"f16"``) into ``payload`` and ``ceil(n /
    block)`` float32 ``scales``. ``block`` is even; the module's docstring has the codes.

    Codes are the nearest to ``x * (largest code / largest magnitude)``, ties to even. With ``stochastic`` a code is one
    of the two nearest, such that the expectation is the value. ``seed``, ``step`` and the element's global index
    (``element_offset`` plus its index in ``x``) decide which of the two. ``threads=0`` uses `default_threads`. Raises
    ``TypeError`` or ``ValueError`` before anything is written.
    """
    _rules.check_integers(step, element_offset, seed, first_step=0)
    kernels().quantize(x, payload, scales, n, code, block, dtype, stochastic, seed, step, element_offset, threads)


def dequantize_blocks(
    payload: Operand,
    scales: Operand,
    out: Operand,
    n: int,
    *,
    code: Code = "int8",
    block: int = 2048,
    dtype: Dtype = "f32",
    threads: int = 0,
) -> None:
    """Decode ``n`` elements: write ``code * scale`` to ``out`` in ``dtype``, rounded to nearest even.

    ``payload``, ``scales``, ``code`` and ``block`` as in `quantize_blocks`. Raises ``TypeError`` or ``ValueError``
    before anything is written.
    """
    kernels().dequantize(payload, scales, out, n, code, block, dtype, threads)
