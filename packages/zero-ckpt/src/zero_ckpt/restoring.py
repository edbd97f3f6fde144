"""Load from the newest checkpoint whose every needed byte is good."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from .coordination import together
from .errors import DamagedError
from .opening import open_checkpoint
from .reader import Checkpoint
from .types import Coordinator, SoloCoordinator

T = TypeVar("T")
logger = logging.getLogger("zero_ckpt")


def restore(
    root: str | os.PathLike[str],
    fill: Callable[[Checkpoint], T],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
) -> tuple[Checkpoint, T]:
    """Open a checkpoint, let `fill` read what it needs, and return both; collective when given a coordinator.

    `fill` runs on every rank and must not communicate. Without a tag, when it meets damaged bytes on any rank, all
    ranks go back to the checkpoint before and call `fill` again, so it must overwrite whatever the first call wrote;
    the checkpoint's `report` names what was passed over. With a tag, damage raises DamagedError.

    Any other exception on any rank raises CheckpointError (or the subclass that the ranks agree on) on every rank.
    """
    group = coordinator or SoloCoordinator()
    damaged: dict[str, str] = {}
    while True:
        checkpoint = open_checkpoint(root, tag, coordinator=group, skip=damaged)
        results: list[T] = []

        def part(checkpoint: Checkpoint = checkpoint, results: list[T] = results) -> str | None:
            try:
                results.append(fill(checkpoint))
            except DamagedError as error:
                if tag is not None:
                    raise
                return str(error)
            return None

        problems = together(group, f"loading {checkpoint.path}", part)
        found = next((problem for problem in problems if problem is not None), None)
        if found is None:
            return checkpoint, results[0]
        logger.warning("checkpoint %r is damaged: %s", checkpoint.tag, found)
        damaged[checkpoint.tag] = found
