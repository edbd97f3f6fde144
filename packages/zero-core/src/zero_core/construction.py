"""`Init`: build a model sharded over the ranks, which never exists in full."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zero_comm import EngineGroups, init
from zero_config import Config
from zero_partition import Init as PartitionInit
from zero_partition import (
    NewShard,
    TiledLinear,
    gathered_anywhere,
    register_external_parameter,
    set_leaf_modules,
    unregister_external_parameter,
)

from .model_parallel import model_parallel
from .supervision import supervisor
from .swap_folders import check_swap_folders

_LEAST_FILE = 1 << 20  # bytes; smaller shards stay in memory, as a process may map only so many files

__all__ = [
    "Init",
    "TiledLinear",
    "gathered",
    "register_external_parameter",
    "set_leaf_modules",
    "unregister_external_parameter",
]


def gathered(parameters: Any, modifier_rank: int | None = None) -> AbstractContextManager[None]:
    """Have ``parameters`` gathered inside the block: of any engine, or of a model built inside `Init`. Collective.

    One parameter or an iterable; None and plain tensors in it are ignored. With ``modifier_rank`` that rank's changes
    become every rank's at exit. Without it an engine keeps changes that are the same on all ranks and refuses others;
    what `Init` has sharded and no engine owns yet loses them.
    """
    return gathered_anywhere(parameters, modifier_rank)


class Init:
    """Context manager: parameters of modules built inside are sharded as soon as their module is attached.

    ``config``: as for `initialize`; without one, or below stage 3, the context does nothing. ``enabled``: false
    switches it off. ``mpu``: as for `initialize`. Initial values equal those that one process with the same seed
    draws. With ``offload_param`` on NVMe the shards wait in files of ``nvme_path``, so that the model need not fit in
    all ranks' memory either. Named as `zero_partition.Init`, which it makes from the configuration. Collective.
    """

    def __init__(
        self, config: Any = None, *, enabled: bool = True, mpu: Any = None, device: torch.device | str | None = None
    ) -> None:
        self._where = torch.device(device) if device is not None else None
        self._config = config
        self._enabled = enabled
        self._mpu = mpu
        self._inner: PartitionInit | None = None

    def __enter__(self) -> Init:
        if self._enabled and self._config is not None:
            init(self._where)
            place = model_parallel(self._mpu)
            ranks = place.data_parallel_size
            resolved = Config.load(supervisor().config(self._config, ranks), world_size=ranks)
            if resolved.zero_optimization.stage >= 3:
                groups = EngineGroups.open(place.data_rows)
                self._inner = PartitionInit(groups.gather, groups.control, new_shard=shards_in(resolved))
                self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inner is not None:
            self._inner.__exit__(kind, error, trace)


def shards_in(config: Config) -> NewShard | None:
    """Shards in files where parameters will live in files; None for memory."""
    section = config.zero_optimization.offload_param
    if section.device != "nvme" or section.nvme_path is None:
        return None
    check_swap_folders(config)
    folder = Path(section.nvme_path[0])

    def new_shard(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if device.type != "cpu" or nbytes < _LEAST_FILE:
            return torch.empty(numel, dtype=dtype, device=device)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="init-") as file:  # the mapping outlives the name
            file.truncate(nbytes)
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)

    return new_shard
