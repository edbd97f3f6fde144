"""The base of every optimizer here: it runs the closure and selects the parameters that have a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer


class ClosureOptimizer(Optimizer, ABC):
    """A `torch.optim.Optimizer` whose subclasses define `update`, the change of the parameters. `step` calls it without
    autograd, after the closure if there is one."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Run ``closure``, if given, with autograd on, then `update`. Returns the closure's result, None without
        one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Update parameters in place from their ``grad``; those without one stay, unless the class says otherwise."""

    def groups_with_gradients(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """Yield each param group with its parameters that have a gradient; groups without any are left out."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if trained:
                yield group, trained


class AdamHyperparameters(TypedDict, total=False):
    """Hyperparameters of Adam and optimizers like it besides the learning rate, for a constructor or a param group; the
    defaults are those of `adam_defaults`.
    """

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
    """Return the arguments as a dict by name, for the ``defaults`` that `torch.optim.Optimizer` takes."""
    return {
        "lr": lr,
        "betas": tuple(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
    }
