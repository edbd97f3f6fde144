"""The base of every optimizer here: the closure, and the parameters that have a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer


class ClosureOptimizer(Optimizer, ABC):
    """A `torch.optim.Optimizer` whose subclasses define `update`, which runs after the closure and without autograd."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return what ``closure``, run with gradients on, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Take one step with the gradients that the parameters hold."""

    def groups_with_gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Yield each param group and those of its parameters that have a gradient; groups with none are left out."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if trained:
                yield group, trained


class AdamHyperparameters(TypedDict, total=False):
    """The hyperparameters that the relatives of Adam take besides the learning rate, for a constructor or a param
    group."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool


def adam_defaults(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> dict[str, Any]:
    """Return the defaults of a relative of Adam, as `torch.optim.Optimizer` takes them."""
    return {
        "lr": lr,
        "betas": tuple(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
    }
