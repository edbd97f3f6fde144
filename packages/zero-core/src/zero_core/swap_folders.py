"""The folders that `nvme_path` names: there before anything is written into them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zero_offload import remove_stores

from .errors import UsageError

if TYPE_CHECKING:
    from zero_config import Config

_STORE = re.compile(r"(optimizer|parameters|activations|parked)\.rank(?P<rank>\d+)")

logger = logging.getLogger("zero_core")


def check_swap_folders(config: Config) -> None:
    """Make the folders of every `nvme_path` in use, if `offload.create` says so.

    Raises UsageError, naming the nearest folder that exists, for one that does not: a drive that is not mounted would
    be replaced by the disk of its mount point.
    """
    for key, name in _in_use(config):
        path = Path(name)
        if path.is_dir():
            continue
        nearest = next(parent for parent in path.absolute().parents if parent.is_dir())
        if not config.offload.create:
            raise UsageError(
                f"{key}: there is no folder {name!r}; the nearest that exists is {str(nearest)!r}. "
                'Mount the drive, make the folder, or have it made by "offload": {"create": true}'
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{key}: cannot make the folder {name!r} in {str(nearest)!r}: {error.strerror}") from error


def remove_abandoned(config: Config, world_size: int) -> None:
    """Remove the swap files of ranks that the job had before and has no more, once per node.

    Ranks that there are find their own files. What another job has open stays.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return

    def is_gone(prefix: str) -> bool:
        match = _STORE.fullmatch(prefix)
        return match is not None and int(match["rank"]) >= world_size

    for names in {tuple(names): None for names in _lists_in_use(config)}:
        for prefix in remove_stores(names, is_gone):
            logger.warning(
                "removed the swap files %s in %s: the job has %d ranks now", prefix, ", ".join(names), world_size
            )


def _lists_in_use(config: Config) -> Iterator[list[str]]:
    """The folders of each `nvme_path` in use; a store lies in all of its list."""
    lists: dict[str, list[str]] = {}
    for key, name in _in_use(config):
        lists.setdefault(key, []).append(name)
    yield from lists.values()


def _in_use(config: Config) -> Iterator[tuple[str, str]]:
    zero = config.zero_optimization
    optimizer, param, activations = zero.offload_optimizer, zero.offload_param, config.offload.activations
    places = (
        ("zero_optimization.offload_optimizer", optimizer.device, optimizer.nvme_path, zero.stage >= 1),
        ("zero_optimization.offload_param", param.device, param.nvme_path, zero.stage == 3),
        ("offload.activations", activations.device, activations.nvme_path, True),
    )
    for key, device, names, used in places:
        for name in (names or ()) if device == "nvme" and used else ():
            yield f"{key}.nvme_path", name
