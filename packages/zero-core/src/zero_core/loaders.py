"""The data loaders that one engine makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .data_loader import RankLoader, rank_loader
from .errors import UsageError
from .state import TrainingState

_ROUTES = ("train", "eval", "predict")


class Loaders:
    """Makes loaders of this rank's samples. ``collate_fn``: of loaders that are not given another."""

    def __init__(self, state: TrainingState, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._state = state
        self._collate_fn = collate_fn

    def make(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> RankLoader[Any]:
        """Return a loader as `Engine.data_loader` describes it. Raises `UsageError`."""
        if route not in _ROUTES:
            raise UsageError(f"engine.data_loader(route=…): expected 'train', 'eval' or 'predict', got {route!r}")
        state = self._state
        return rank_loader(
            dataset,
            batch_size if batch_size is not None else state.sizes.micro,
            rank=state.partition.data_rank,
            ranks=state.partition.data_world_size,
            device=state.device,
            shuffle=route == "train",
            sampler=sampler,
            collate_fn=collate_fn if collate_fn is not None else self._collate_fn,
            drop_last=state.config.dataloader_drop_last,
            pin_memory=pin_memory,
            workers=workers,
            virtual_ranks=state.config.virtual_ranks if route == "train" else 0,
        )
