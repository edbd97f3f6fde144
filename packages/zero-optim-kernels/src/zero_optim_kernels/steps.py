"""One optimizer step over addresses or buffers.

Every function updates one contiguous range (``n`` an int) or a list of tensors (``n`` a list, and every operand a list of the same
length). Dtypes: ``param_dtype`` ``"f32"``, ``"bf16"`` or ``"f64"``; ``grad_dtype`` ``"f32"``, ``"bf16"``, ``"f16"``; ``state_dtype``
``"f32"``, ``"bf16"`` or ``"int8"``; with ``"f64"`` parameters everything is ``"f64"``.

* A ``"bf16"`` parameter without ``param_low`` is rounded stochastically; with it, the pair is an exact float32.
* ``"int8"`` state is one code per element plus one float32 scale per block of 256 elements (``*_scale``); zeros are the initial state.
  Blocks are anchored at multiples of 256 from ``element_offset``, which must be one too; tensors of a list each start a block.
* ``grad_scale`` multiplies the gradient; ``zero_grad`` clears it after it was read; ``copy_out`` receives the new weights in
  ``copy_dtype`` (``"f32"``, ``"bf16"``, ``"f16"``).
* ``element_offset`` is the global position of element 0: with ``seed`` and ``step`` it fixes the random numbers, so a buffer that is
  split into several calls (at block boundaries for 8-bit state) ends with the same bits.
* ``segments`` is a table of rows ``(end, lr, weight_decay, beta1, beta2)`` sorted by ``end``, counted from element 0 of the call, the last
  one equal to ``n``; it replaces the scalars.
* ``step`` counts from 1. ``threads=0`` uses `default_threads`.

Wrong arguments raise ``TypeError`` or ``ValueError`` before anything is written. The caller keeps the memory behind addresses alive and
does not touch it during the call, which releases the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _native, _rules
from ._types import Count, Dtype, Operands, Segment

__all__ = ["adagrad_step", "adam_step", "lamb_apply", "lamb_step", "lion_step", "sgd_step"]


def adam_step(
    param: Operands,
    grad: Operands,
    exp_avg: Operands,
    exp_avg_sq: Operands,
    n: Count,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    param_dtype: Dtype = "f32",
    grad_dtype: Dtype = "f32",
    state_dtype: Dtype = "f32",
    param_low: Operands | None = None,
    copy_out: Operands | None = None,
    copy_dtype: Dtype | None = None,
    zero_grad: bool = False,
    exp_avg_scale: Operands | None = None,
    exp_avg_sq_scale: Operands | None = None,
    element_offset: int = 0,
    segments: Sequence[Segment] | None = None,
    seed: int = 0,
    threads: int = 0,
) -> None:
    """One step of AdamW, or of Adam with ``adamw_mode=False`` (arXiv 1412.6980 algorithm 1, arXiv 1711.05101 algorithm 2)."""
    _rules.check_step(step)
    rows = [
        _rules.adam_row(
            segment, step=step, eps=eps, adamw_mode=adamw_mode, bias_correction=bias_correction, grad_scale=grad_scale
        )
        for segment in _rules.segments_of(n, segments, lr, weight_decay, betas)
    ]
    _native.step(
        _rules.ADAM, False, n, param, param_low, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, copy_out, None,
        param_dtype, grad_dtype, state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step, threads,
    )  # fmt: skip
