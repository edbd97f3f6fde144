"""Data loaders of an engine, and compilation of its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .data_loader import RankLoader, rank_loader
from .errors import UsageError
from .state import TrainingState

_ROUTES = ("train", "eval", "predict")


class Loaders:
    """Makes data loaders of this rank's samples. ``collate_fn``: their default; None for torch's."""

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
        """Return a loader of this rank's samples of ``dataset`` (map-style), shuffled for the ``route`` "train" only.
        ``batch_size`` (samples per batch and rank), ``collate_fn``: by default the engine's. ``sampler``: the user's,
        replaces ours. ``workers``: processes that prepare batches ahead. Raises `UsageError` for another route or data
        set."""
        if route not in _ROUTES:
            raise UsageError(f"engine.data_loader(route=…): expected 'train', 'eval' or 'predict', got {route!r}")
        state = self._state
        return rank_loader(
            dataset,
            batch_size if batch_size is not None else state.sizes.micro,
            rank=state.sample_rank,
            ranks=state.sizes.ranks,
            device=state.device,
            shuffle=route == "train",
            sampler=sampler,
            collate_fn=collate_fn if collate_fn is not None else self._collate_fn,
            drop_last=state.config.dataloader_drop_last,
            pin_memory=pin_memory,
            workers=workers,
            virtual_ranks=state.config.virtual_ranks if route == "train" else 0,
        )


_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def compile_module(
    state: TrainingState,
    backend: str | Callable[..., Any],
    compile_kwargs: Mapping[str, Any] | None,
    schedule: Any,
    compiled_autograd_enabled: bool,
) -> None:
    """Let torch.compile compile the module with ``backend`` and ``compile_kwargs``; replace ``state.compiled`` by the
    names of the compiled modules. Raises `UsageError` for a schedule, compiled autograd, and CUDA graphs with released
    weights."""
    state.check_open("compile")
    options = dict(compile_kwargs or {})
    if schedule is not None:
        raise UsageError("engine.compile(schedule=…): a schedule of DeepCompile's passes is not available; remove it")
    if compiled_autograd_enabled:
        raise UsageError(
            "engine.compile(compiled_autograd_enabled=True) would trace gathers and reductions into one backward graph "
            "and is not available; leave it false"
        )
    if options.get("mode") in _CUDA_GRAPH_MODES and any(unit.releasable for unit in state.partition.units):
        raise UsageError(
            f"engine.compile(compile_kwargs={{'mode': {options['mode']!r}}}): CUDA graphs need weights that stay in "
            "place, but stage 3 releases them; use mode 'default' or 'max-autotune-no-cudagraphs', or stage 2"
        )
    state.compiled[:] = state.partition.runtime.compile(state.module, backend=backend, **options)
