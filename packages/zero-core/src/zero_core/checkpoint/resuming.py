"""Resume a job from the newest copy in node memory or the newest checkpoint on disk. ``run``: the folder of the run's
checkpoints, which copies in memory name to say whose they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zero_ckpt import Checkpoint, CheckpointError, DamagedError, NotFoundError, open_any

from ..report import counted
from ..state import TrainingState
from .in_memory import InMemory
from .saving import coordinator_of

logger = logging.getLogger("zero_core")

Load = Callable[[Path, "str | None", "Checkpoint | None"], "tuple[str, dict[str, Any]]"]
"""Loads root/tag (None: the newest, at first the open one) into the engine; returns the path and the client state."""


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run continues: after optimizer step ``step``, loaded from the folder ``path`` in ``source``, with
    its ``client_state``."""

    step: int
    source: Literal["memory", "disk"]
    path: str
    client_state: dict[str, Any]


def resume(state: TrainingState, memory: InMemory, root: Path, load: Load, *, run: str) -> Resumed | None:
    """Load the newest state by ``load`` and log it; return where it continues, None if there is no state. ``root``: the
    folder of checkpoints of this part of the model. Collective. Raises `zero_ckpt.CheckpointError` on every rank when
    there are checkpoints and none can be loaded."""
    resumed = _resume(state, memory, root, load, run)
    if resumed is not None and state.reports:
        sizes = state.sizes
        logger.warning(
            "resumed from %s after step %d and %d samples: %s; batch %d = %d x %d accumulation x %s",
            *(resumed.source, resumed.step, state.counters.global_samples, resumed.path),
            *(sizes.train, sizes.micro, sizes.steps, counted(sizes.ranks, "rank")),
        )
    return resumed


def _resume(state: TrainingState, memory: InMemory, root: Path, load: Load, run: str) -> Resumed | None:
    """Do what `resume` does, without a log: try the copy in memory first, unless the checkpoint on disk is newer; then
    the disk."""
    everybody = state.model_part.coordinator or coordinator_of(state)
    found, on_disk = memory.find(run), None
    with suppress(NotFoundError, *(() if found is None else (DamagedError,))):  # damage is logged
        on_disk = open_any(root, coordinator=everybody)
    if found is not None and (on_disk is None or found.step >= on_disk.step):
        try:
            path, client = load(memory.fetch(found, run), found.tag, None)
        except CheckpointError as problem:
            if on_disk is None:
                raise
            text = "the copy of step %d in the nodes' memory cannot be loaded, the disk is next: %s"
            logger.warning(text, found.step, problem)
        else:
            return Resumed(state.counters.global_steps, "memory", path, client)
    if on_disk is None:
        return None
    path, client = load(root, None, on_disk)
    return Resumed(state.counters.global_steps, "disk", path, client)
