"""The rules in float64.

Arithmetic is float64 on the values that the kernels read; results are what exact arithmetic would give, before any
rounding to a storage dtype. What one sum gives the next (the scaled and decayed gradient, the second moment) is
rounded to float32 as a kernel holds it, so that each sum is judged by itself.
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
    """New values, and for each the largest magnitude among the terms of the sums that made it, as they enter the last
    one.
    """

    param: Array
    first: Array | None
    second: Array | None
    param_term: Array
    first_term: Array | None
    second_term: Array | None
    direction: Array


def _rounded(row: tuple[int, tuple[float, ...]]) -> tuple[float, ...]:
    """The coefficients as a float32 kernel reads them."""
    return tuple(float(np.float32(value)) for value in row[1])


def _wide(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)


def _largest(*terms: Array) -> Array:
    return _wide(np.maximum.reduce([abs(term) for term in terms]))


def _held(x: Array) -> Array:
    return _wide(x.astype(np.float32))


def _decayed(g: Array, p: Array, l2: float) -> tuple[Array, Array]:
    """The gradient with the decay added to it in float32, and its largest term."""
    if l2 != 0.0:
        g = _wide(g.astype(np.float32) + (l2 * p).astype(np.float32))
    return _held(g), abs(g)


def _lerp(a: Array, b: Array, b_term: Array, weight: float, rest: float) -> tuple[Array, Array]:
    """a + weight (b - a), and its largest term."""
    return (a + weight * (b - a) if weight < 0.5 else b - (b - a) * rest), _largest(a, b_term, b - a)


@dataclass
class _Adam:
    first: Array
    first_term: Array
    second: Array
    second_term: Array
    direction: Array
    direction_term: Array


def _adam(p: Array, g: Array, m: Array, v: Array, c: tuple[float, ...]) -> _Adam:
    """Adam's moments and direction, from coefficients in the kernel's order."""
    _, _, l2, w1, rest1, b2, w2, _, inverse_root, eps = c
    g, g_term = _decayed(g, p, l2)
    m_new, m_term = _lerp(m, g, g_term, w1, rest1)
    v_new = b2 * v + w2 * g * g
    v_term = _largest(b2 * v, w2 * g_term * g_term, v_new)
    denominator = np.sqrt(_held(_held(b2 * v) + _held(_held(w2 * g) * g))) * inverse_root + eps
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
    """Adam and AdamW."""
    segment: Segment = (0, lr, weight_decay, betas[0], betas[1])
    c = _rounded(
        _rules.adam_coefficients(
            segment, step=step, eps=eps, adamw_mode=adamw_mode, bias_correction=bias_correction, grad_scale=grad_scale
        )
    )
    p = _wide(param)
    new = _adam(p, _wide(grad) * c[0], _wide(exp_avg), _wide(exp_avg_sq), c)
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
    """LAMB on one whole parameter: update, ratio of norms, application."""
    c = _rounded(
        _rules.lamb_coefficients(
            (0, lr, weight_decay, *betas), step=step, eps=eps, bias_correction=True, grad_scale=grad_scale
        )
    )
    p = _wide(param)
    new = _adam(p, _wide(grad) * c[0], _wide(exp_avg), _wide(exp_avg_sq), c)
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
    """Lion."""
    scale, decay, w1, rest1, w2, rest2, negative_step = _rounded(
        _rules.lion_coefficients((0, lr, weight_decay, *betas), grad_scale=grad_scale)
    )
    p, g, m = _wide(param), _wide(grad) * scale, _wide(exp_avg)
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
    """Adagrad."""
    row = _rules.adagrad_coefficients(
        (0, lr, weight_decay, 0.0, 0.0), step=step, lr_decay=lr_decay, eps=eps, grad_scale=grad_scale
    )
    scale, l2, negative_step, rounded_eps = _rounded(row)
    p, v = _wide(param), _wide(sum_sq)
    g, g_term = _decayed(_wide(grad) * scale, p, l2)
    v_new = v + g * g
    denominator = np.sqrt(_held(v + _held(g * g))) + rounded_eps
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
    """Stochastic gradient descent; ``momentum_buffer`` is None without momentum."""
    row = _rules.sgd_coefficients(
        (0, lr, weight_decay, 0.0, 0.0),
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        first=first,
        grad_scale=grad_scale,
    )
    scale, l2, negative_lr, rounded_momentum, keep, _, _ = _rounded(row)
    p = _wide(param)
    g, g_term = _decayed(_wide(grad) * scale, p, l2)
    if momentum_buffer is None:
        return Result(
            p + negative_lr * g, None, None, _largest(p, negative_lr * g_term, p + negative_lr * g), None, None, g
        )
    m = _wide(momentum_buffer)
    m_new = g if first else rounded_momentum * m + keep * g
    m_term = g_term if first else _largest(rounded_momentum * m, keep * g_term, m_new)
    u = g + rounded_momentum * m_new if nesterov else m_new
    u_term = _largest(g_term, rounded_momentum * m_term, u) if nesterov else m_term
    return Result(
        p + negative_lr * u, m_new, None, _largest(p, negative_lr * u_term, p + negative_lr * u), m_term, None, u
    )
