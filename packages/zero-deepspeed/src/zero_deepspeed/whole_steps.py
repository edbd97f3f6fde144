"""Whole optimizer steps as DeepSpeed's PipelineEngine takes them: micro-batches from an iterator, one mean loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zero_core.data_loader import RepeatingLoader
from zero_core.engine import Engine
from zero_core.errors import UsageError
from zero_partition.micro_batches import LossOf


class WholeSteps:
    """Takes whole optimizer steps of ``engine``, over the micro-batches that are given or those of its training
    data."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._repeating: RepeatingLoader[Any] | None = None

    def take(self, batches: Iterable[Any] | None, loss_fn: LossOf, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Take one optimizer step over ``batches`` by `Engine.train_batch`, by default (None) over the next ones of the
        engine's training data, which begin again at their end. Return the mean loss over the micro-batches and the
        ranks of ``group`` (None: all), detached, a scalar.

        ``loss_fn``: returns the loss, given the model's output and the micro-batch. Raises `UsageError` without batches
        and training data. Collective.
        """
        loss = self._engine.train_batch(self._training_data() if batches is None else batches, loss_fn)
        if dist.is_initialized() and (ranks := dist.get_world_size(group)) > 1:
            loss = loss.clone()  # the instruments may keep it
            dist.all_reduce(loss, group=group)
            loss /= ranks
        return loss

    def restart_data(self) -> None:
        """Make the next step begin a new iteration over the training data: loading a checkpoint has set the position
        from which it continues."""
        self._repeating = None

    def _training_data(self) -> RepeatingLoader[Any]:
        """Return the endless iteration over the training data, begun before if the engine's loader is still the same.
        Raises `UsageError` without training data."""
        loader = self._engine.training_dataloader
        if loader is None:
            raise UsageError(
                "engine.train_batch: expected micro-batches, got none, and the engine has no training data. Pass "
                "data_iter, or training_data=… to initialize"
            )
        if self._repeating is None or self._repeating.loader is not loader:
            self._repeating = RepeatingLoader(loader)
        return self._repeating
