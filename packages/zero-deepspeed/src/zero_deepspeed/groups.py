"""`deepspeed.utils.groups`: with data parallelism alone, every group is all ranks or one."""

from __future__ import annotations

import torch.distributed as dist

from .communication import get_world_group
from .errors import UnsupportedError


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of all ranks. Raises `UsageError` before torch.distributed is initialised."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    """Return this process's rank among all ranks."""
    return dist.get_rank()


def model_parallel_world_size() -> int:
    """Return 1, the number of ranks that compute a layer, or a sequence, together."""
    return 1


def model_parallel_rank() -> int:
    """Return 0, this rank's index among the ranks that compute a layer, or a sequence, together."""
    return 0


def no_group() -> dist.ProcessGroup:
    """Raise `UnsupportedError`: there is no such group."""
    raise UnsupportedError("there is no tensor, sequence or expert parallelism here; use the group of all ranks")
