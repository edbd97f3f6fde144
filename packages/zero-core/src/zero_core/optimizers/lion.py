"""Lion on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .closure import loss_of


class Lion(Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolation of gradient and moment, decoupled decay."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not trained:
                continue
            gradients = [p.grad for p in trained]
            for p in trained:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in trained]
            beta1, beta2 = group["betas"]
            directions = torch._foreach_lerp(gradients, moments, beta1)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(trained, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(trained, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1.0 - beta2)
        return loss
