"""Lion."""

from __future__ import annotations

from typing import Any

import torch

from .base import ClosureOptimizer


class Lion(ClosureOptimizer):
    """Lion (arXiv 2302.06675, algorithm 2): steps of length ``lr`` by the sign of gradient and moment interpolated,
    with decoupled ``weight_decay``.

    ``params``: parameters or param groups, as torch optimizers take them. ``betas``: the weights of the moment in the
    step, and of its own update.
    """

    elementwise = True

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def update(self) -> None:
        """Update every parameter that has a gradient in place, with torch's foreach operations per param group. A
        parameter's moment is made, as zeros, at its first update."""
        for group, trained in self.groups_with_gradients():
            gradients = [p.grad for p in trained if p.grad is not None]
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
