"""The rules in float64: one function for each optimizer, with the hyperparameters of the kernel of the same name.

Arithmetic is float64 on the values that the kernels read; arguments are not changed, and results are those of exact
arithmetic, before they are rounded to a storage dtype. An intermediate result that enters another sum (the scaled and
decayed gradient, the second moment) is rounded to float32 as in a kernel, so that each sum's error is measured by
itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _rules
from .._types import Segment

__all__ = ["Result", "adagrad", "adam", "lamb", "lion", "sgd"]

Array = npt.NDArray[np.float64]


@dataclass
class Result:
    """The new values of one step, each with its ``*_term``: the largest magnitude among the terms of the sum that made
    it, per element, by which the sum's rounding error is judged.

    ``first``, ``second``: the moments, None where the rule has none. ``direction``: the update before it is multiplied
    by the learning rate.
    """

    param: Array
    first: Array | None
    second: Array | None
    param_term: Array
    first_term: Array | None
    second_term: Array | None
    direction: Array


def _float32_coefficients(row: tuple[int, tuple[float, ...]]) -> tuple[float, ...]:
    """Return the coefficients of a row (end, coefficients), rounded to float32 as a kernel reads them."""
    return tuple(float(np.float32(value)) for value in row[1])


def _as_float64(x: Any) -> Array:
    """Return numbers as a float64 array: ``x`` itself, not a copy, if it is one."""
    return np.asarray(x, dtype=np.float64)


def _largest(*terms: Array) -> Array:
    """Return, per element, the largest magnitude among the terms, arrays of one shape."""
    return _as_float64(np.maximum.reduce([abs(term) for term in terms]))


def _to_f32(x: Array) -> Array:
    """Return float64 numbers rounded to float32, as float64."""
    return _as_float64(x.astype(np.float32))


def _decayed(g: Array, p: Array, l2: float) -> tuple[Array, Array]:
    """Return (the gradient ``g`` plus ``l2 * p``, rounded to float32 as in a kernel; the magnitude of that sum, per
    element)."""
    if l2 != 0.0:
        g = _as_float64(g.astype(np.float32) + (l2 * p).astype(np.float32))
    return _to_f32(g), abs(g)


def _lerp(a: Array, b: Array, b_term: Array, weight: float, rest: float) -> tuple[Array, Array]:
    """Return (``a + weight * (b - a)``, the largest magnitude among the terms of that sum), both per element.
    ``b_term`` is the largest term of the sum that made ``b``, ``rest`` is 1 - weight."""
    return (a + weight * (b - a) if weight < 0.5 else b - (b - a) * rest), _largest(a, b_term, b - a)


@dataclass
class _Adam:
    """Adam's new moments and its update direction, each with the largest term of the sum that made it."""

    first: Array
    first_term: Array
    second: Array
    second_term: Array
    direction: Array
    direction_term: Array


def _adam(p: Array, g: Array, m: Array, v: Array, c: tuple[float, ...]) -> _Adam:
    """Return Adam's new moments and direction for parameters ``p``, scaled gradients ``g`` and moments ``m`` and ``v``;
    ``c``: the coefficients in the kernel's order.
    """
    _, _, l2, w1, rest1, b2, w2, _, inverse_root, eps = c
    g, g_term = _decayed(g, p, l2)
    m_new, m_term = _lerp(m, g, g_term, w1, rest1)
    v_new = b2 * v + w2 * g * g
    v_term = _largest(b2 * v, w2 * g_term * g_term, v_new)
    denominator = np.sqrt(_to_f32(_to_f32(b2 * v) + _to_f32(_to_f32(w2 * g) * g))) * inverse_root + eps
    return _Adam(m_new, m_term, v_new, v_term, m_new / denominator, m_term / denominator)


def adam(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
) -> Result:
    """Return the result of one step of AdamW, or with ``adamw_mode=False`` of Adam; ``step`` counts from 1."""
    segment: Segment = (0, lr, weight_decay, betas[0], betas[1])
    c = _float32_coefficients(
        _rules.adam_coefficients(
            segment, step=step, eps=eps, adamw_mode=adamw_mode, bias_correction=bias_correction, grad_scale=grad_scale
        )
    )
    p = _as_float64(param)
    new = _adam(p, _as_float64(grad) * c[0], _as_float64(exp_avg), _as_float64(exp_avg_sq), c)
    value = p * c[1] + c[7] * new.direction
    term = _largest(p * c[1], c[7] * new.direction_term, value)
    return Result(value, new.first, new.second, term, new.first_term, new.second_term, new.direction)


def lamb(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> Result:
    """Return the result of one step of LAMB, both halves, for one full parameter; ``step`` counts from 1."""
    c = _float32_coefficients(
        _rules.lamb_coefficients(
            (0, lr, weight_decay, *betas), step=step, eps=eps, bias_correction=True, grad_scale=grad_scale
        )
    )
    p = _as_float64(param)
    new = _adam(p, _as_float64(grad) * c[0], _as_float64(exp_avg), _as_float64(exp_avg_sq), c)
    u = new.direction * c[1] + c[7] * p
    u_term = _largest(new.direction_term * c[1], c[7] * p)
    weight, update = math.sqrt(float(np.sum(p * p))), math.sqrt(float(np.sum(u * u)))
    factor = lr * (weight / update if weight > 0.0 and update > 0.0 else 1.0)
    term = _largest(p, factor * u_term, p - factor * u)
    return Result(p - factor * u, new.first, new.second, term, new.first_term, new.second_term, u)


def lion(
    param: Any,
    grad: Any,
    exp_avg: Any,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> Result:
    """Return the result of one step of Lion, which needs no step number; ``second`` and ``second_term`` are None."""
    scale, decay, w1, rest1, w2, rest2, negative_step = _float32_coefficients(
        _rules.lion_coefficients((0, lr, weight_decay, *betas), grad_scale=grad_scale)
    )
    p, g, m = _as_float64(param), _as_float64(grad) * scale, _as_float64(exp_avg)
    u = np.sign(_lerp(m, g, abs(g), w1, rest1)[0])
    m_new, m_term = _lerp(m, g, abs(g), w2, rest2)
    value = p * decay + negative_step * u
    return Result(value, m_new, None, _largest(p * decay, negative_step * u, value), m_term, None, u)


def adagrad(
    param: Any,
    grad: Any,
    sum_sq: Any,
    *,
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
) -> Result:
    """Return the result of one step of Adagrad; ``step`` counts from 1."""
    row = _rules.adagrad_coefficients(
        (0, lr, weight_decay, 0.0, 0.0), step=step, lr_decay=lr_decay, eps=eps, grad_scale=grad_scale
    )
    scale, l2, negative_step, rounded_eps = _float32_coefficients(row)
    p, v = _as_float64(param), _as_float64(sum_sq)
    g, g_term = _decayed(_as_float64(grad) * scale, p, l2)
    v_new = v + g * g
    denominator = np.sqrt(_to_f32(v + _to_f32(g * g))) + rounded_eps
    u = g / denominator
    term = _largest(p, negative_step * g_term / denominator, p + negative_step * u)
    return Result(p + negative_step * u, None, v_new, term, None, _largest(v, g_term * g_term, v_new), u)


def sgd(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first: bool = False,
    grad_scale: float = 1.0,
) -> Result:
    """Return the result of one step of SGD; ``momentum_buffer`` is None without momentum, and not read with
    ``first``.
    """
    row = _rules.sgd_coefficients(
        (0, lr, weight_decay, 0.0, 0.0),
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        first=first,
        grad_scale=grad_scale,
    )
    scale, l2, negative_lr, rounded_momentum, keep, _, _ = _float32_coefficients(row)
    p = _as_float64(param)
    g, g_term = _decayed(_as_float64(grad) * scale, p, l2)
    if momentum_buffer is None:
        return Result(
            p + negative_lr * g,
            None,
            None,
            _largest(p, negative_lr * g_term, p + negative_lr * g),
            None,
            None,
            g,
        )
    m = _as_float64(momentum_buffer)
    m_new = g if first else rounded_momentum * m + keep * g
    m_term = g_term if first else _largest(rounded_momentum * m, keep * g_term, m_new)
    u = g + rounded_momentum * m_new if nesterov else m_new
    u_term = _largest(g_term, rounded_momentum * m_term, u) if nesterov else m_term
    return Result(
        p + negative_lr * u,
        m_new,
        None,
        _largest(p, negative_lr * u_term, p + negative_lr * u),
        m_term,
        None,
        u,
    )
