"""1-bit LAMB."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..base import AdamHyperparameters, adam_defaults
from .adam import OneBitOptimizer, adam_denominator, bias_corrections, check_positive

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB (arXiv 2104.06069, algorithm 1).

    The first ``freeze_step`` steps are LAMB's, with trust ratios between ``min_coeff`` and ``max_coeff``, of which an
    exponential average (``coeff_beta``) is kept. Then the variance and these averages are frozen, and momenta are
    averaged over the ranks as in 1-bit Adam, scaled to the same magnitude for all parameters before they are encoded.
    A fresh variance is still advanced, by the gradient that the averaged momenta imply. A parameter's frozen ratio is
    multiplied by the excess of the frozen over the fresh denominator; this factor stays between ``factor_min`` and
    ``factor_max`` and changes by at most ``factor_threshold`` (a fraction of it) per step.

    ``1 / (1 - coeff_beta)`` should not be more than ``freeze_step``. Raises ValueError for a ``freeze_step`` below 1.
    ``params``, ``lr``, ``adam``: as for Adam (`AdamHyperparameters`).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        freeze_step: int = 100_000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **adam: Unpack[AdamHyperparameters],
    ) -> None:
        check_positive(type(self), freeze_step=freeze_step)
        super().__init__(params, {**adam_defaults(lr, **adam), "max_coeff": max_coeff, "min_coeff": min_coeff})
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold

    def _uses_own_gradients(self, number: int) -> bool:
        """Return whether step ``number`` (from 1) uses this rank's own gradients: one after ``freeze_step``."""
        return number > self.freeze_step

    def _new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of ``p`` before its first step: zero moments, and three float64 scalars, under DeepSpeed's
        names: frozen ratio, factor, scale.
        """
        numbers = {"lamb_coeff_freeze": 0.0, "last_factor": 1.0, "scaling_coeff": 1.0}
        return {**super()._new_state(p), **{k: torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}}

    def _take_step(self, number: int, own: bool) -> None:
        """Update all parameters in step ``number``: by LAMB from averaged gradients or, if the gradients are this
        rank's ``own``, with frozen variance and ratios from momenta that are averaged over the ranks, which is
        collective."""
        if own:
            self._compressed_step(number)
            return
        for group, p in self._parameters():
            if p.grad is not None:
                self._advance_moments(group, p, variance=True)
                self._lamb_step(group, p, number)

    def _lamb_step(self, group: dict[str, Any], p: torch.Tensor, number: int) -> None:
        """Apply step ``number`` of LAMB to ``p``, in place, from its moments, and add its trust ratio to the ratio's
        average."""
        state = self.state[p]
        first, second = bias_corrections(group, number, number)
        direction = (state["exp_avg"] / first).div_(adam_denominator(group, state["exp_avg_sq"], second))
        direction.add_(p, alpha=group["weight_decay"])
        weight, update = _norm(p), _norm(direction)
        ratio = weight / update if weight > 0.0 and update > 0.0 else 1.0
        ratio = min(max(ratio, group["min_coeff"]), group["max_coeff"])
        state["lamb_coeff_freeze"].mul_(self.coeff_beta).add_((1.0 - self.coeff_beta) * ratio)
        p.add_(direction, alpha=-group["lr"] * ratio)

    def _compressed_step(self, number: int) -> None:
        """Advance the momenta, average them over the ranks, and apply step ``number`` with frozen ratios; the first
        such step freezes them. Collective.
        """
        if number == self.freeze_step + 1:
            self._freeze()
        before = [self.state[p]["exp_avg"].clone() for _, p in self._parameters()]
        for group, p in self._parameters():
            self._advance_moments(group, p, variance=False)
            self.state[p]["exp_avg"].mul_(float(self.state[p]["scaling_coeff"]))
        self._average_over_ranks([self.state[p]["exp_avg"] for _, p in self._parameters()], number)
        for (group, p), earlier in zip(self._parameters(), before, strict=True):
            self._apply_frozen(group, p, earlier, number)

    def _freeze(self) -> None:
        """Begin the fresh variance of each parameter as a copy of the frozen one, and set ``scaling_coeff``, the factor
        that brings its momentum to the mean magnitude of all momenta: 1 for a momentum of zeros.
        """
        scales = [_norm(self.state[p]["exp_avg"]) / math.sqrt(max(p.numel(), 1)) for _, p in self._parameters()]
        united = sum(scales) / len(scales)
        for (_, p), scale in zip(self._parameters(), scales, strict=True):
            state = self.state[p]
            state["scaling_coeff"].fill_(united / scale if scale > 0.0 and united > 0.0 else 1.0)
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _apply_frozen(self, group: dict[str, Any], p: torch.Tensor, earlier: torch.Tensor, number: int) -> None:
        """Apply step ``number`` to ``p`` from its averaged momentum, and advance its fresh variance and its factor;
        ``earlier``: the momentum before this step.
        """
        state, (beta1, beta2) = self.state[p], group["betas"]
        momentum, fresh = state["exp_avg"].div_(float(state["scaling_coeff"])), state["exp_avg_sq_fresh"]
        gradient = (momentum - earlier * beta1).div_(1.0 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        first, frozen_correction = bias_corrections(group, number, self.freeze_step)
        _, fresh_correction = bias_corrections(group, number, number)
        frozen = adam_denominator(group, state["exp_avg_sq"], frozen_correction)
        step = (momentum / first).div_(frozen)
        direction = step + p * group["weight_decay"]
        excess = float((frozen / adam_denominator(group, fresh, fresh_correction)).max()) if p.numel() else 1.0
        share = min(1.0, _norm(step) / (_norm(direction) or 1.0)) if group["weight_decay"] > 0.0 else 1.0
        factor = self._limited_factor(excess * share + 1.0 - share, float(state["last_factor"]))
        state["last_factor"].fill_(factor)
        p.add_(direction, alpha=-group["lr"] * factor * float(state["lamb_coeff_freeze"]))

    def _limited_factor(self, factor: float, last: float) -> float:
        """Return ``factor`` limited to ``factor_min`` ... ``factor_max``, and to a change of at most
        ``factor_threshold`` from ``last``, the factor of the step before."""
        factor = min(max(factor, self.factor_min), self.factor_max)
        return min(max(factor, last * (1.0 - self.factor_threshold)), last * (1.0 + self.factor_threshold))


def _norm(x: torch.Tensor) -> float:
    """Return the Euclidean norm of all elements, computed in float64; the host waits for it."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
