"""One optimizer step over addresses or buffers.

Every function updates one contiguous range (``n`` an int) or a list of tensors (``n`` a list, and every operand a
list of the same length). Dtypes: ``param_dtype`` ``"f32"``, ``"bf16"`` or ``"f64"``; ``grad_dtype`` ``"f32"``,
``"bf16"``, ``"f16"``; ``state_dtype`` ``"f32"``, ``"bf16"`` or ``"int8"``; with ``"f64"`` parameters everything is
``"f64"``.

* A ``"bf16"`` parameter without ``param_low`` is rounded stochastically; with it, the pair is an exact float32.
* ``"int8"`` state is one code per element plus one float32 scale per block of 256 elements (``*_scale``); zeros are
  the initial state. ``element_offset`` must be a multiple of 256; blocks begin there and every 256 elements, and each
  tensor of a list begins a new block.
* ``grad_scale`` is a factor of the gradient as it is read; ``zero_grad`` sets the gradient to zero after it was read;
  ``copy_out`` receives the new weights in ``copy_dtype`` (``"f32"``, ``"bf16"``, ``"f16"``).
* ``element_offset`` is the global index of element 0: with ``seed`` and ``step`` it fixes the random numbers, so
  splitting a buffer into several calls (at block boundaries for 8-bit state) does not change the resulting bits.
* ``segments`` is a table of rows ``(end, lr, weight_decay, beta1, beta2)``, which replaces the scalars. Rows are sorted
  by ``end``, an index from element 0 of the call; the last one is ``n``. For a list of tensors the table has one row
  for all or one per tensor, and ``end`` is not read.
* ``out`` (not for LAMB) takes the new values of what a call writes, by the name of the argument: ``{"param": …,
  "exp_avg": …, "exp_avg_sq": …}``, with ``param_low`` and the scales where they are given. ``param`` and the states are
  only read then. Each is the argument's own memory, or does not overlap any argument. The bits are those of the call
  without it.
* ``step`` counts from 1. ``threads=0`` uses `default_threads`.

Wrong arguments raise ``TypeError`` or ``ValueError`` before anything is written. The caller keeps the memory behind
addresses alive and does not touch it during the call, which releases the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import _rules
from ._calls import kernels
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
    out: Mapping[str, Operands] | None = None,
    seed: int = 0,
    threads: int = 0,
) -> None:
    """Apply one step of AdamW (arXiv 1711.05101, algorithm 2), or with ``adamw_mode=False`` of Adam (arXiv 1412.6980,
    algorithm 1). Shared arguments: see the module docstring.
    """
    _rules.check_integers(step, element_offset, seed)
    rows = [
        _rules.adam_coefficients(
            row, step=step, eps=eps, adamw_mode=adamw_mode, bias_correction=bias_correction, grad_scale=grad_scale
        )
        for row in _rules.segment_table(n, segments, lr, weight_decay, betas)
    ]
    written = [
        ("param", param),
        ("param_low", param_low),
        ("exp_avg", exp_avg),
        ("exp_avg_sq", exp_avg_sq),
        ("exp_avg_scale", exp_avg_scale),
        ("exp_avg_sq_scale", exp_avg_sq_scale),
    ]
    kernels().step(
        _rules.ADAM, False, n, param, param_low, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, copy_out,
        None, param_dtype, grad_dtype, state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step, threads,
        _rules.results(out, written),
    )  # fmt: skip


def adagrad_step(
    param: Operands,
    grad: Operands,
    sum_sq: Operands,
    n: Count,
    *,
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    param_dtype: Dtype = "f32",
    grad_dtype: Dtype = "f32",
    state_dtype: Dtype = "f32",
    param_low: Operands | None = None,
    copy_out: Operands | None = None,
    copy_dtype: Dtype | None = None,
    zero_grad: bool = False,
    sum_sq_scale: Operands | None = None,
    element_offset: int = 0,
    segments: Sequence[Segment] | None = None,
    out: Mapping[str, Operands] | None = None,
    seed: int = 0,
    threads: int = 0,
) -> None:
    """Apply one step of `torch.optim.Adagrad` (JMLR 12, 2011, figure 1), with its decays of weights and learning rate.

    ``sum_sq``: its accumulator ``sum``. The betas of ``segments`` are ignored. Shared arguments: see the module
    docstring.
    """
    _rules.check_integers(step, element_offset, seed)
    rows = [
        _rules.adagrad_coefficients(row, step=step, lr_decay=lr_decay, eps=eps, grad_scale=grad_scale)
        for row in _rules.segment_table(n, segments, lr, weight_decay, (0.0, 0.0))
    ]
    written = [
        ("param", param),
        ("param_low", param_low),
        ("", None),
        ("sum_sq", sum_sq),
        ("", None),
        ("sum_sq_scale", sum_sq_scale),
    ]
    kernels().step(
        _rules.ADAGRAD, False, n, param, param_low, grad, None, sum_sq, None, sum_sq_scale, copy_out, None,
        param_dtype, grad_dtype, state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step, threads,
        _rules.results(out, written),
    )  # fmt: skip


def lion_step(
    param: Operands,
    grad: Operands,
    exp_avg: Operands,
    n: Count,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    param_dtype: Dtype = "f32",
    grad_dtype: Dtype = "f32",
    state_dtype: Dtype = "f32",
    param_low: Operands | None = None,
    copy_out: Operands | None = None,
    copy_dtype: Dtype | None = None,
    zero_grad: bool = False,
    exp_avg_scale: Operands | None = None,
    element_offset: int = 0,
    segments: Sequence[Segment] | None = None,
    out: Mapping[str, Operands] | None = None,
    seed: int = 0,
    threads: int = 0,
) -> None:
    """Apply one step of Lion (arXiv 2302.06675, algorithm 2); ``step`` only seeds stochastic rounding.

    Shared arguments: see the module docstring.
    """
    _rules.check_integers(step, element_offset, seed)
    rows = [
        _rules.lion_coefficients(row, grad_scale=grad_scale)
        for row in _rules.segment_table(n, segments, lr, weight_decay, betas)
    ]
    written = [
        ("param", param),
        ("param_low", param_low),
        ("exp_avg", exp_avg),
        ("", None),
        ("exp_avg_scale", exp_avg_scale),
        ("", None),
    ]
    kernels().step(
        _rules.LION, False, n, param, param_low, grad, exp_avg, None, exp_avg_scale, None, copy_out, None,
        param_dtype, grad_dtype, state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step, threads,
        _rules.results(out, written),
    )  # fmt: skip


def sgd_step(
    param: Operands,
    grad: Operands,
    momentum_buffer: Operands | None,
    n: Count,
    *,
    step: int,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first: bool | None = None,
    grad_scale: float = 1.0,
    param_dtype: Dtype = "f32",
    grad_dtype: Dtype = "f32",
    state_dtype: Dtype = "f32",
    param_low: Operands | None = None,
    copy_out: Operands | None = None,
    copy_dtype: Dtype | None = None,
    zero_grad: bool = False,
    momentum_buffer_scale: Operands | None = None,
    element_offset: int = 0,
    segments: Sequence[Segment] | None = None,
    out: Mapping[str, Operands] | None = None,
    seed: int = 0,
    threads: int = 0,
) -> None:
    """Apply one step of `torch.optim.SGD`. Shared arguments: see the module docstring.

    With ``first``, by default at step 1, the momentum buffer is not read but set to the gradient. ``momentum_buffer``
    is None if and only if ``momentum`` is 0; the betas of ``segments`` are ignored. Raises ValueError for a buffer
    without momentum, and the reverse.
    """
    _rules.check_integers(step, element_offset, seed)
    if (momentum_buffer is None) != (momentum == 0.0):
        raise ValueError(f"momentum_buffer: needed when momentum is not 0 and only then, got momentum = {momentum}")
    starts = step == 1 if first is None else first
    rows = [
        _rules.sgd_coefficients(
            row, momentum=momentum, dampening=dampening, nesterov=nesterov, first=starts, grad_scale=grad_scale
        )
        for row in _rules.segment_table(n, segments, lr, weight_decay, (0.0, 0.0))
    ]
    written = [
        ("param", param),
        ("param_low", param_low),
        ("momentum_buffer", momentum_buffer),
        ("", None),
        ("momentum_buffer_scale", momentum_buffer_scale),
        ("", None),
    ]
    kernels().step(
        _rules.SGD, False, n, param, param_low, grad, momentum_buffer, None, momentum_buffer_scale, None, copy_out,
        None, param_dtype, grad_dtype, state_dtype, copy_dtype, rows, zero_grad, element_offset, seed, step, threads,
        _rules.results(out, written),
    )  # fmt: skip


def lamb_step(
    param: Operands,
    grad: Operands,
    exp_avg: Operands,
    exp_avg_sq: Operands,
    update: Operands,
    n: Count,
    *,
    step: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    param_dtype: Dtype = "f32",
    grad_dtype: Dtype = "f32",
    state_dtype: Dtype = "f32",
    param_low: Operands | None = None,
    zero_grad: bool = False,
    exp_avg_scale: Operands | None = None,
    exp_avg_sq_scale: Operands | None = None,
    element_offset: int = 0,
    segments: Sequence[Segment] | None = None,
    seed: int = 0,
    threads: int = 0,
) -> list[tuple[float, float]]:
    """Run the first half of LAMB (arXiv 1904.00962, algorithm 2): advance the moments, write ``update``, the direction.

    ``update`` is float32 (float64 for ``"f64"`` parameters) and may be the gradient's own memory when the dtypes are
    equal. ``param`` is only read; the learning rates of ``segments`` are ignored.

    Returns the squared norms (parameter, direction) over this call's elements, for each row of ``segments`` or each
    tensor of a list: sum them over the calls and ranks that hold a parameter, then pass the learning rate times the
    ratio of the norms to `lamb_apply`. Shared arguments: see the module docstring.
    """
    _rules.check_integers(step, element_offset, seed)
    table = _rules.segment_table(n, segments, 0.0, weight_decay, betas)
    rows = [
        _rules.lamb_coefficients(row, step=step, eps=eps, bias_correction=bias_correction, grad_scale=grad_scale)
        for row in table
    ]
    if not isinstance(n, int) and len(rows) == 1:
        rows = rows * len(n)
    norms = kernels().step(
        _rules.LAMB, False, n, param, param_low, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, None,
        update, param_dtype, grad_dtype, state_dtype, None, rows, zero_grad, element_offset, seed, step, threads, None,
    )  # fmt: skip
    return [] if norms is None else norms


def lamb_apply(
    param: Operands,
    update: Operands,
    n: Count,
    *,
    step: int,
    steps: Sequence[tuple[int, float]],
    param_dtype: Dtype = "f32",
    param_low: Operands | None = None,
    copy_out: Operands | None = None,
    copy_dtype: Dtype | None = None,
    element_offset: int = 0,
    seed: int = 0,
    threads: int = 0,
) -> None:
    """Run the second half of LAMB: ``param -= factor * update`` for each row ``(end, factor)`` of ``steps``.

    The factor is the learning rate times the trust ratio: the parameter's norm over the direction's, 1 where either is
    0. For a list of tensors ``steps`` has one row per tensor, and ``end`` is not read. Shared arguments: see the module
    docstring.
    """
    _rules.check_integers(step, element_offset, seed)
    rows: list[tuple[int, tuple[float, ...]]] = [(end, (factor,)) for end, factor in steps]
    wide = "f64" if param_dtype == "f64" else "f32"
    kernels().step(
        _rules.LAMB, True, n, param, param_low, None, None, None, None, None, copy_out, update,
        param_dtype, wide, wide, copy_dtype, rows, False, element_offset, seed, step, threads, None,
    )  # fmt: skip
