"""`deepspeed.utils.groups`: with data parallelism alone, every group is all ranks or one."""

from __future__ import annotations

import torch.distributed as dist

from .communication import get_world_group
from .errors import UnsupportedError


def get_data_parallel_group() -> dist.ProcessGroup:
    """All ranks."""
    return get_world_group()


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    """This rank."""
    return dist.get_rank()


def one() -> int:
    """Ranks that compute one layer, or one sequence, together."""
    return 1


def zero() -> int:
    """This rank's number among them."""
    return 0


def no_group() -> dist.ProcessGroup:
    """Raises `UnsupportedError`: there is no such group."""
    raise UnsupportedError("there is no tensor, sequence or expert parallelism here; use the group of all ranks")
