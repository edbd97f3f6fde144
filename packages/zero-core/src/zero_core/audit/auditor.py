"""The interface between an engine and its auditor, and the auditor that does nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ..state import TrainingState


class Auditor(Protocol):
    """Checks that ranks hold equal and uncorrupted state. Call order on every rank: `forward` and `backward` for each
    micro-batch; at the boundary `before_step` and, once the weights are published, `after_step`."""

    def forward(self) -> AbstractContextManager[None]:
        """Return a context in which the engine runs a forward pass; it may record calls of modules."""

    def backward(self, loss: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context for the backward pass of ``loss`` (None: of several); may repeat work, and be collective."""

    def before_step(self) -> None:
        """In an audited step compare the ranks' gradients, weights and states, before any weight is updated; in others
        do nothing. Raises `AuditError` on every rank if anything differs on any. Collective, at every boundary."""

    def after_step(self) -> None:
        """Prepare for the next step: take digests of this rank's published state if that step is audited."""

    def restart_step(self) -> None:
        """Discard what micro-batches of the current step have shown, as the step begins again after a failure."""

    def forget_digests(self) -> None:
        """Discard the digests of the last step's states, as a checkpoint is about to overwrite them."""


class Unaudited:
    """An `Auditor` that does nothing."""

    def forward(self) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def backward(self, loss: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def restart_step(self) -> None: ...
    def forget_digests(self) -> None: ...


def auditor_for(state: TrainingState, every: int | None) -> Auditor:
    """Return an auditor that checks every ``every`` steps; for None one that does nothing, without imports."""
    if every is None:
        return Unaudited()
    from .periodic import PeriodicAuditor

    return PeriodicAuditor(state, every)
