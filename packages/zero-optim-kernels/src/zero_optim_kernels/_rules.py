"""The coefficients that each rule's kernel reads, in the order of `csrc/rules-inl.h`, prepared in float64. A rule is
the update of one optimizer.

The reference in `reference/steps.py` and the kernels both start from these, so that what is compared is the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ._types import Operands, Segment

__all__ = [
    "ADAGRAD",
    "ADAM",
    "LAMB",
    "LION",
    "SGD",
    "adagrad_coefficients",
    "adam_coefficients",
    "check_integers",
    "lamb_coefficients",
    "lion_coefficients",
    "results",
    "segment_table",
    "sgd_coefficients",
]

ADAM, ADAGRAD, LION, SGD, LAMB = range(5)


def check_integers(step: int, element_offset: int, seed: int, *, first_step: int = 1) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless all three are ints below 2**63, ``step`` is at least ``first_step``,
    and ``element_offset`` and ``seed`` are at least 0."""
    for name, value, least in (("step", step, first_step), ("element_offset", element_offset, 0), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if not least <= value < 2**63:
            raise ValueError(f"{name}: expected {least} or more and less than 2**63, got {value}")


def _check_at_least_zero(name: str, value: float) -> None:
    """Raise ``ValueError``, naming the argument ``name``, for a ``value`` below 0 or NaN."""
    if not value >= 0.0:
        raise ValueError(f"{name}: expected a number >= 0, got {value}")


def _check_beta(name: str, value: float) -> None:
    """Raise ``ValueError``, naming the argument ``name``, for a ``value`` outside [0, 1) or NaN."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1), got {value}")


def segment_table(
    n: int | Sequence[int],
    segments: Sequence[Segment] | None,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> Sequence[Segment]:
    """Return the segment table of a call, which says which hyperparameters apply to which elements: ``segments``, or,
    if that is None, one row of the scalars, which ends at ``n``.

    A row is (end, lr, weight_decay, beta1, beta2), for the elements before ``end``. Where ``n`` is a list, a row's end
    is not read. Raises ``ValueError`` for a negative learning rate or decay, and for a beta outside [0, 1).
    """
    rows = segments
    if rows is None:
        rows = [(n if isinstance(n, int) else 0, lr, weight_decay, betas[0], betas[1])]
    for _, row_lr, row_decay, beta1, beta2 in rows:
        _check_at_least_zero("lr", row_lr)
        _check_at_least_zero("weight_decay", row_decay)
        _check_beta("beta1", beta1)
        _check_beta("beta2", beta2)
    return rows


def results(
    out: Mapping[str, Operands] | None, written: Sequence[tuple[str, Operands | None]]
) -> tuple[Operands | None, ...] | None:
    """Return the operands in ``out``, by name, as a tuple in the order of ``written``, pairs (name, argument) of
    everything that the call writes; None in place of an argument that is None. Return None without ``out``.

    Raises ``ValueError`` unless ``out`` has exactly the names of the arguments that are given.
    """
    if out is None:
        return None
    names = [name for name, argument in written if argument is not None]
    if set(out) != set(names):
        raise ValueError(f"out: expected {', '.join(names)}, got {', '.join(out) or 'nothing'}")
    return tuple(out.get(name) for name, _ in written)


def adam_coefficients(
    segment: Segment, *, step: int, eps: float, adamw_mode: bool, bias_correction: bool, grad_scale: float
) -> tuple[int, tuple[float, ...]]:
    """Return where a segment (end, lr, weight_decay, beta1, beta2) ends, and the coefficients of AdamW in the order of
    the native rule. Raises ``ValueError`` for a negative ``eps``.

    With ``adamw_mode=False`` those of Adam, which adds the weight decay to the gradient.
    """
    end, lr, weight_decay, beta1, beta2 = segment
    _check_at_least_zero("eps", eps)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    return end, (
        grad_scale,
        1.0 - lr * weight_decay if adamw_mode else 1.0,
        0.0 if adamw_mode else weight_decay,
        1.0 - beta1,
        beta1,
        beta2,
        1.0 - beta2,
        -lr / correction1,
        1.0 / math.sqrt(correction2),
        eps,
    )


def lamb_coefficients(
    segment: Segment, *, step: int, eps: float, bias_correction: bool, grad_scale: float
) -> tuple[int, tuple[float, ...]]:
    """Return where a segment (end, lr, weight_decay, beta1, beta2) ends, and the coefficients of LAMB's update
    direction in the order of the native rule; the learning rate is not read. Raises ``ValueError`` for a negative
    ``eps``."""
    end, _, weight_decay, beta1, beta2 = segment
    _check_at_least_zero("eps", eps)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    return end, (
        grad_scale,
        1.0 / correction1,
        0.0,
        1.0 - beta1,
        beta1,
        beta2,
        1.0 - beta2,
        weight_decay,
        1.0 / math.sqrt(correction2),
        eps,
    )


def lion_coefficients(segment: Segment, *, grad_scale: float) -> tuple[int, tuple[float, ...]]:
    """Return where a segment (end, lr, weight_decay, beta1, beta2) ends, and the coefficients of Lion in the order of
    the native rule.
    """
    end, lr, weight_decay, beta1, beta2 = segment
    return end, (grad_scale, 1.0 - lr * weight_decay, 1.0 - beta1, beta1, 1.0 - beta2, beta2, -lr)


def adagrad_coefficients(
    segment: Segment, *, step: int, lr_decay: float, eps: float, grad_scale: float
) -> tuple[int, tuple[float, ...]]:
    """Return where a segment (end, lr, weight_decay, …) ends, and the coefficients of Adagrad in the order of the
    native rule; the betas are not read. Raises ``ValueError`` for a negative ``lr_decay`` or ``eps``."""
    end, lr, weight_decay, _, _ = segment
    _check_at_least_zero("lr_decay", lr_decay)
    _check_at_least_zero("eps", eps)
    return end, (grad_scale, weight_decay, -lr / (1.0 + (step - 1) * lr_decay), eps)


def sgd_coefficients(
    segment: Segment, *, momentum: float, dampening: float, nesterov: bool, first: bool, grad_scale: float
) -> tuple[int, tuple[float, ...]]:
    """Return where a segment (end, lr, weight_decay, …) ends, and the coefficients of stochastic gradient descent in
    the order of the native rule; the betas are not read.

    ``first``: the momentum buffer is not read but set to the gradient. Raises ``ValueError`` for a negative momentum,
    and for ``nesterov`` without momentum or with dampening.
    """
    end, lr, weight_decay, _, _ = segment
    _check_at_least_zero("momentum", momentum)
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov: needs momentum > 0 and dampening = 0, got momentum = {momentum} and dampening = {dampening}"
        )
    return end, (grad_scale, weight_decay, -lr, momentum, 1.0 - dampening, float(nesterov), float(first))
