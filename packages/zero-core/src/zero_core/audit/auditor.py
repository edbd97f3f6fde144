"""The interface between an engine and its auditor, and the auditor of runs that audit nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ..state import TrainingState


class Auditor(Protocol):
    """The calls with which an engine tells its auditor, on every rank, in this order: for each micro-batch `forward`,
    `backward`; at the boundary `before_step` and, when the weights are published, `after_step`."""

    def forward(self) -> AbstractContextManager[None]:
        """A context around a forward pass."""

    def backward(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """A context around the backward pass of ``loss``."""

    def before_step(self) -> None:
        """Gradients are there, weights are still the old ones. Raises `AuditError` on every rank. Collective."""

    def after_step(self) -> None:
        """The weights are published."""

    def step_begins(self) -> None:
        """The step under way begins anew, after a failure."""

    def forget(self) -> None:
        """Forget what was at rest: the user or a checkpoint has written it."""


class Unaudited:
    """Nobody looks, and nothing is kept."""

    def forward(self) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def before_step(self) -> None:
        """Nothing to do."""

    def after_step(self) -> None:
        """Nothing to do."""

    def step_begins(self) -> None:
        """Nothing to do."""

    def forget(self) -> None:
        """Nothing to do."""


def auditor_for(state: TrainingState, every: int | None) -> Auditor:
    """An auditor that looks every so many steps; None for never, when nothing that audits is imported."""
    if every is None:
        return Unaudited()
    from .periodic import PeriodicAuditor

    return PeriodicAuditor(state, every)
