"""Load from the newest checkpoint in which every byte that is read is good."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from .coordination import run_on_all_ranks
from .dry_run import current_dry_run
from .dry_run_reads import DryRunCheckpoint
from .errors import DamagedError, ReplacedError
from .opening import damage_advice, open_checkpoint
from .reader import Checkpoint
from .types import Coordinator, SoloCoordinator

T = TypeVar("T")
_REPLACED, _DAMAGED = "replaced", "damaged"
_REPLACEMENTS = 20
logger = logging.getLogger("zero_ckpt")


class Opener(Protocol):
    """Opens a checkpoint, collectively: `open_checkpoint`, or another function with its arguments and errors."""

    def __call__(
        self, root: str | os.PathLike[str], tag: str | None, /, *, coordinator: Coordinator, skip: Mapping[str, str]
    ) -> Checkpoint:
        """Return checkpoint `tag` of `root`, or the newest one that is not in `skip`."""
        ...


def restore(
    root: str | os.PathLike[str],
    fill: Callable[[Checkpoint], T],
    tag: str | None = None,
    *,
    coordinator: Coordinator | None = None,
    opener: Opener = open_checkpoint,
    opened: Checkpoint | None = None,
) -> tuple[Checkpoint, T]:
    """Open a checkpoint, let `fill` read what it needs, and return the checkpoint and what `fill` returned; collective
    when given a coordinator.

    Without a tag it begins with the one that `latest` names. `fill` runs on every rank and must not communicate.
    Without a tag, when it meets damaged bytes on any rank, all ranks open the next older whole checkpoint and call
    `fill` again, so it must overwrite everything that the first call wrote; the checkpoint's `report` names those that
    were passed over. With a tag, damage raises DamagedError. When a save replaces the checkpoint while it is read, it
    is opened again, up to 20 times. In a dry run (see `zero_ckpt.dry_run`) `fill` is called once, and its reads are
    only counted. `opener` opens the checkpoint, and the next one; `opened` is what it has just returned, to begin with.

    Raises NotFoundError when there is no checkpoint, and DamagedError when no whole one is left. Any other exception on
    any rank raises CheckpointError (or the subclass that the ranks agree on) on every rank.
    """
    dry_run = current_dry_run()
    if dry_run is not None:
        counted = DryRunCheckpoint(Path(root), dry_run)
        return counted, fill(counted)
    group = coordinator or SoloCoordinator()
    damaged: dict[str, str] = {}
    attempts = 0
    while True:
        checkpoint = opened or opener(root, tag, coordinator=group, skip=damaged)
        opened = None
        results: list[T] = []

        def part(
            checkpoint: Checkpoint = checkpoint, results: list[T] = results, last: bool = attempts >= _REPLACEMENTS
        ) -> list[str] | None:
            """Call `fill` on this rank, add its result to `results`, and return None. If the checkpoint was replaced or
            is damaged, return [kind of problem, message] instead; `last`: a replaced one raises, as it was opened often
            enough."""
            try:
                results.append(fill(checkpoint))
            except ReplacedError as error:
                if last:
                    raise
                return [_REPLACED, str(error)]
            except DamagedError as error:
                if tag is not None:
                    raise
                return [_DAMAGED, str(error)]
            return None

        try:
            answers = run_on_all_ranks(group, f"loading {checkpoint.path}", part)
        except DamagedError as error:  # of the tag that was asked for
            advised = DamagedError(f"{error}\n{damage_advice(Path(root), [checkpoint.tag])}")
            advised.causes = error.causes  # whose text is in the message already
            raise advised from error
        problems = [problem for problem in answers if problem is not None]
        if not problems:
            return checkpoint, results[0]
        if any(kind == _REPLACED for kind, _ in problems):
            attempts += 1
            continue
        found = problems[0][1]
        logger.warning("checkpoint %r is damaged: %s", checkpoint.tag, found)
        damaged[checkpoint.tag] = found
