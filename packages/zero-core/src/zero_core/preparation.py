"""What a script sets up before it trains: loaders of this rank's samples, the compiled module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from .compiling import compile_model
from .errors import UsageError
from .loading import RankLoader, rank_loader
from .persistence import Persistence


class Preparation(Persistence):
    """The part of `Engine` before the first step."""

    _collate_fn: Callable[[list[Any]], Any] | None
    _compiled: list[str]

    def data_loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: Literal["train", "eval", "predict"] = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> RankLoader[Any]:
        """A loader of this rank's samples of ``dataset``, shuffled for ``route="train"`` (see `RankLoader`).

        ``batch_size``: samples per batch and rank, by default the micro-batch. ``num_local_io_workers``: processes that
        prepare batches ahead. Raises `UsageError` for data without samples by number.
        """
        if route not in ("train", "eval", "predict"):
            raise UsageError(f"engine.data_loader(route=…): expected 'train', 'eval' or 'predict', got {route!r}")
        return rank_loader(
            dataset,
            batch_size if batch_size is not None else self.train_micro_batch_size_per_gpu(),
            rank=self._partition.data_rank,
            ranks=self._partition.data_world_size,
            device=self.device,
            shuffle=route == "train",
            sampler=data_sampler,
            collate_fn=collate_fn if collate_fn is not None else self._collate_fn,
            drop_last=self._config.dataloader_drop_last,
            pin_memory=pin_memory,
            workers=num_local_io_workers,
            virtual_ranks=self.resolved_config.virtual_ranks if route == "train" else 0,
        )

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile the module, from its next call on: whole at stages 0 to 2, unit by unit at stage 3.

        ``compile_kwargs``: for `torch.compile`. Raises `UsageError` for DeepCompile's ``schedule``, for compiled
        autograd, and at stage 3 for modes that use CUDA graphs.
        """
        self._check_open("compile")
        self._compiled = compile_model(
            self.module, self._partition, backend, compile_kwargs, schedule, compiled_autograd_enabled
        )

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return bool(self._compiled)

    @property
    def compiled_modules(self) -> list[str]:
        """Names of the modules that are compiled, each as one graph unless its own code breaks it."""
        return list(self._compiled)
