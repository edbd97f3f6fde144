"""The one folder and tag of a checkpoint, where ranks name different ones."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_ckpt.any_format import holds_any
from zero_core.errors import UsageError

from .state_files import latest_universal

if TYPE_CHECKING:
    from zero_core.engine import Engine

logger = logging.getLogger("DeepSpeed")


class TagError(UsageError, AssertionError):
    """The ranks have different tags for one checkpoint; also an AssertionError, which DeepSpeed raises there."""


def agreed_place(
    engine: Engine, call: str, folder: str | os.PathLike[str] | None, tag: str | None
) -> tuple[str, str | None]:
    """Return the first rank's ``folder`` and ``tag`` (None without one) on every rank, as a checkpoint has one place.
    Collective.

    Logs a warning if this rank's differ; of a tag not if `checkpoint.tag_validation` is "Ignore". ``call``: the
    engine's method, for messages. Raises `UsageError` if the engine was destroyed or its states are offloaded, and if
    the first rank has no folder; `TagError`, on every rank, for tags that differ if `checkpoint.tag_validation` is
    "Fail".
    """
    engine.training_state.check_open(call)
    given = ["" if folder is None else os.fspath(folder), None if tag is None else str(tag)]
    told = _gather_from_ranks(engine, call, given)
    first, first_tag = told[0]
    if not first:
        raise UsageError(f"{call}: expected a folder, got {folder!r}")
    validation = engine.resolved_config.checkpoint.tag_validation
    tags = sorted({str(other) for _, other in told})
    if len(tags) > 1 and validation == "Fail":
        raise TagError(
            f"{call}: the ranks have different tags, {', '.join(tags)}, and checkpoint.tag_validation is Fail: give "
            "all of them the same"
        )
    rank = engine.partition.data_rank
    if first != given[0]:
        logger.warning("%s(%r) on rank %d: the folder of rank 0 counts, %r", call, given[0], rank, first)
    if first_tag != given[1] and validation != "Ignore":
        logger.warning("%s(tag=%r) on rank %d: the tag of rank 0 counts, %r", call, given[1], rank, first_tag)
    return first, first_tag


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a folder, as the first rank finds it. ``has_latest``: there is a file `latest`.
    ``universal``: the tag in `latest_universal`. ``has_any``: there is a checkpoint, be it damaged."""

    has_latest: bool
    universal: str | None
    has_any: bool


def newest(engine: Engine, folder: str) -> Newest:
    """Return what the first rank finds in ``folder``, on every rank: they could see different files while a save
    replaces them. Collective."""
    has_latest = (Path(folder) / "latest").is_file()
    found = [has_latest, latest_universal(folder), has_latest or holds_any(folder)]
    return Newest(*_gather_from_ranks(engine, "load_checkpoint", found)[0])


def _gather_from_ranks(engine: Engine, call: str, given: list[Any]) -> list[Any]:
    """Return what every rank passes as ``given``, in the order of the ranks; ``call``: the engine's method, for errors.
    Collective.
    """
    told: list[Any] = engine.partition.runtime.agree(call, "", given)
    if engine.model_part.coordinator is not None:
        told = [each for part in engine.model_part.coordinator.all_gather_object(told) for each in part]
    return told
