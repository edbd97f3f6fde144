"""The folders that `nvme_path` names: create or check them, and remove files that an earlier run abandoned."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zero_offload import remove_stores
from zero_offload.folders import folder_problem

from .errors import UsageError

if TYPE_CHECKING:
    from zero_offload.swap_paths import PathList
    from zero_settings import Config

_STORE = re.compile(r"(optimizer|parameters|activations|parked)\.rank(?P<rank>\d+)(-gradients)?")

logger = logging.getLogger("zero_core")


def check_swap_folders(config: Config) -> None:
    """Check that files can be written in the folders of every `nvme_path` in use; create missing folders if
    `offload.create` is set. Raises `UsageError` with the key, the folder and the reason."""
    for paths in folders_in_use(config):
        for name in paths.folders:
            if (problem := folder_problem(name, create=config.offload.create)) is not None:
                raise UsageError(f"{paths.key}: {problem}")


def remove_abandoned(config: Config, rank: int, world_size: int) -> None:
    """Remove the swap files that an earlier run left of ``rank`` and, on the first rank of each node, of ranks that the
    job no longer has (>= ``world_size``). Call it before free space on the drives is measured. Files that a process has
    open stay."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"

    def is_left(prefix: str) -> bool:
        """Return whether ``prefix`` is that of a store of this rank or, on a node's first rank, of one that the job no
        longer has."""
        match = _STORE.fullmatch(prefix)
        return match is not None and (int(match["rank"]) == rank or (first and int(match["rank"]) >= world_size))

    for names in {tuple(paths.folders) for paths in folders_in_use(config)}:
        for prefix in remove_stores(names, is_left):
            if (match := _STORE.fullmatch(prefix)) is not None and int(match["rank"]) != rank:
                logger.warning(
                    "removed the swap files %s in %s: the job has %d ranks now", prefix, ", ".join(names), world_size
                )


def folders_in_use(config: Config) -> Iterator[PathList]:
    """Yield the folders and the key of every `nvme_path` in use; a store is striped over all folders of one."""
    zero = config.zero_optimization
    optimizer, param, activations = zero.offload_optimizer, zero.offload_param, config.offload.activations
    for section, used in ((optimizer, zero.stage >= 1), (param, zero.stage == 3), (activations, True)):
        if section.device == "nvme" and used:
            yield section.paths
