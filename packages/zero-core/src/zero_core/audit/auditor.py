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
        """Return a context for a forward pass of the engine; it may record calls of modules."""

    def backward(self, loss: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context for the backward pass of ``loss``, or of several losses if that is None. It may repeat work
        and be collective."""

    def before_step(self) -> None:
        """If the step that is about to begin is audited, compare the ranks' gradients, weights and states. Raises
        `AuditError` on every rank if anything differs on any. Collective, at every boundary."""

    def after_step(self) -> None:
        """Prepare for the next step: if it is audited, take digests of this rank's weights and states."""

    def restart_step(self) -> None:
        """Discard what the micro-batches since the last step have shown: a failure makes the step begin again."""

    def forget_digests(self) -> None:
        """Discard the digests that `after_step` took, as a checkpoint is about to overwrite the states."""


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
    """Return an auditor that audits every ``every``-th step; for None one that does nothing."""
    if every is None:
        return Unaudited()
    from .periodic import PeriodicAuditor

    return PeriodicAuditor(state, every)
