"""1-bit Adam."""

from __future__ import annotations

from typing import Any

import torch

from .base import OneBitOptimizer, corrections


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (arXiv 2102.02888, algorithm 1), with decoupled weight decay.

    The first ``freeze_step`` steps are Adam's. Then the variance stays as it is, every rank advances the momentum with
    its own gradient, and the ranks average their momenta, one bit per element.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        freeze_step: int = 100_000,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.freeze_step = freeze_step

    def _on_own(self, number: int) -> bool:
        return number > self.freeze_step

    def _update(self, number: int, own: bool) -> None:
        for group, p in self._parameters():
            if own or p.grad is not None:
                self._advance_moments(group, p, variance=not own)
        if own:
            self._average([self.state[p]["exp_avg"] for _, p in self._parameters()], number)
        for group, p in self._parameters():
            if own or p.grad is not None:
                first, second = corrections(group, number, min(number, self.freeze_step))
                adam_step(group, p, self.state[p], first, second)


def adam_step(
    group: dict[str, Any], p: torch.Tensor, state: dict[str, torch.Tensor], first: float, second: float
) -> None:
    """Decay ``p`` and move it along its momentum; ``first`` and ``second`` are the bias corrections."""
    p.mul_(1.0 - group["lr"] * group["weight_decay"])
    p.addcdiv_(state["exp_avg"], denominator(group, state["exp_avg_sq"], second), value=-group["lr"] / first)


def denominator(group: dict[str, Any], variance: torch.Tensor, correction: float) -> torch.Tensor:
    """What the momentum is divided by."""
    root: torch.Tensor = variance.sqrt() / correction**0.5
    return root.add_(group["eps"])
