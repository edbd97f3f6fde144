"""The seam through which a tool follows an engine of a script that does not know of it."""

from __future__ import annotations

from typing import Protocol

import torch

from zero_partition import StepResult


class Observer(Protocol):
    """What one engine reports, on every rank.

    Call order per micro-batch: `loss`; at the boundary of accumulation also `before_step`, when all gradients have been
    averaged, and `after_step`, when the weights are published. All may communicate.
    """

    def loss(self, loss: torch.Tensor) -> None: ...
    def before_step(self) -> None: ...
    def after_step(self, result: StepResult) -> None: ...


class Unobserved:
    """The observer of an engine that nobody follows."""

    def loss(self, loss: torch.Tensor) -> None:
        """Nothing to do."""

    def before_step(self) -> None:
        """Nothing to do."""

    def after_step(self, result: StepResult) -> None:
        """Nothing to do."""
