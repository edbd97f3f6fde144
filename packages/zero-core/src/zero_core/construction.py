"""`Init`: build a model sharded over the ranks, which never exists in full."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from zero_comm import EngineGroups, init
from zero_offload import malloc
from zero_partition import Init as PartitionInit
from zero_partition import (
    NewShard,
    TiledLinear,
    gathered_anywhere,
    register_external_parameter,
    set_leaf_modules,
    unregister_external_parameter,
)
from zero_settings import Config

from .model_parallel import model_parallel
from .supervision import supervisor
from .swap_folders import check_swap_folders

_MIN_FILE_NBYTES = 1 << 20  # smaller shards stay in memory, as the number of mappings of a process is limited

__all__ = [
    "Init",
    "TiledLinear",
    "gathered",
    "register_external_parameter",
    "set_leaf_modules",
    "unregister_external_parameter",
]


def gathered(parameters: Any, modifier_rank: int | None = None) -> AbstractContextManager[None]:
    """Gather ``parameters``, of any engine or of a model built inside `Init`, for the block. Collective.
    ``parameters``: one or an iterable; None and plain tensors in it are ignored. ``modifier_rank``: the rank whose
    changes become every rank's at exit. Without it, an engine keeps changes that are equal on all ranks and refuses
    others; parameters of `Init` that no engine owns yet lose them."""
    return gathered_anywhere(parameters, modifier_rank)


class Init:
    """Context manager that shards parameters of modules built inside, as soon as a module is attached to its parent.

    ``config``, ``mpu``, ``device``: as for `initialize`. The context does nothing without a ``config``, below stage 3,
    and when ``enabled`` is false. Initial values equal those that one process with the same seed draws. With
    ``offload_param`` on NVMe the shards are in files below ``nvme_path``, so that the model may exceed the memory of
    all ranks; `keep_freed_memory` holds from here on. Named as `zero_partition.Init`, which it makes. Collective."""

    def __init__(
        self, config: Any = None, *, enabled: bool = True, mpu: Any = None, device: torch.device | str | None = None
    ) -> None:
        self._where = torch.device(device) if device is not None else None
        self._config = config
        self._enabled = enabled
        self._mpu = mpu
        self._inner: PartitionInit | None = None

    def __enter__(self) -> Init:
        """Open process groups and start sharding modules as they are built; do nothing if sharding is off.
        Collective."""
        if self._enabled and self._config is not None:
            init(self._where)
            place = model_parallel(self._mpu)
            ranks = place.ranks
            resolved = Config.load(supervisor().config(self._config, ranks), world_size=ranks)
            if resolved.zero_optimization.stage >= 3:
                if resolved.keep_freed_memory is not None:
                    malloc.keep_freed_memory(resolved.keep_freed_memory)
                groups = EngineGroups.open(place.data_rows, for_cpu=True)
                self._inner = PartitionInit(groups.gather, groups.control, new_shard=shards_in(resolved))
                self._inner.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Stop sharding modules as they are built; unless the block raised, first shard parameters that are still full,
        which is collective."""
        if self._inner is not None:
            self._inner.__exit__(*failure)


def shards_in(config: Config) -> NewShard | None:
    """Return the function that allocates shards in files, for ``offload_param`` on NVMe; None where they go into
    memory. Raises `UsageError` for a folder that cannot be used."""
    section = config.zero_optimization.offload_param
    if section.device != "nvme" or section.nvme_path is None:
        return None
    check_swap_folders(config)
    folder = Path(section.nvme_path[0])

    def new_shard(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised 1-D shard of ``numel`` elements: in an unnamed file; in memory if small or not on the
        CPU."""
        nbytes = numel * dtype.itemsize
        if device.type != "cpu" or nbytes < _MIN_FILE_NBYTES:
            return torch.empty(numel, dtype=dtype, device=device)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="init-") as file:  # the mapping outlives the name
            file.truncate(nbytes)
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)

    return new_shard
