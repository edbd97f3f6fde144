"""`deepspeed.utils.groups` and `parallel_state_sp`: all ranks, and those that share a sequence if there are such.

`register_mpu` says which ranks share a sequence; before it every group is all ranks or one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero_core.errors import UsageError
from zero_sequence import SequenceGroups

from .communication import get_world_group
from .errors import UnsupportedError

_REGISTERED: list[tuple[Any, Any]] = []
"""The mpu whose ranks share sequences, with torch's group of all ranks for which it was made; empty without one."""


def register_mpu(mpu: Any) -> None:
    """Make the functions of this module answer for ``mpu``, which has the methods of `SequenceGroups`, until another
    is registered or torch.distributed is closed.
    """
    _REGISTERED[:] = [(mpu, dist.group.WORLD)]


def registered_mpu() -> Any:
    """Return the mpu of the ranks that share a sequence; None without one, or after torch.distributed was closed."""
    return _REGISTERED[0][0] if _REGISTERED and _REGISTERED[0][1] is dist.group.WORLD else None


def open_sequence_groups(size: int) -> SequenceGroups:
    """Return the registered groups of ``size`` ranks, opened and registered if they are not. Collective.

    Raises `SequenceError` on every rank if ``size`` does not divide the number of ranks.
    """
    known = registered_mpu()
    if not isinstance(known, SequenceGroups) or known.size != size:
        known = SequenceGroups.open(size)
        register_mpu(known)
    return known


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Let every ``sequence_parallel_size`` consecutive ranks share a sequence. Collective. Raises `SequenceError`."""
    open_sequence_groups(sequence_parallel_size)


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks that have samples of their own, one of each sequence; of all ranks where none is
    shared. Raises `UsageError` before torch.distributed is initialised."""
    known = registered_mpu()
    return get_world_group() if known is None else known.get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that have samples of their own, those of a sequence counted as one."""
    known = registered_mpu()
    return dist.get_world_size() if known is None else int(known.get_data_parallel_world_size())


def get_data_parallel_rank() -> int:
    """Return this process's number among the ranks that have samples of their own."""
    known = registered_mpu()
    return dist.get_rank() if known is None else int(known.get_data_parallel_rank())


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of all ranks, over which states are sharded. Raises as `get_data_parallel_group`."""
    return get_world_group()


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of all ranks."""
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    """Return this process's rank among all ranks."""
    return dist.get_rank()


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks that share this rank's sequences. Raises `UsageError` if no mpu is registered."""
    known = registered_mpu()
    if known is None:
        raise UsageError(
            "no ranks share a sequence yet: call UlyssesSPAttentionHF.register_with_transformers, or initialize with "
            "an mpu that has get_sequence_parallel_group"
        )
    group: dist.ProcessGroup = known.get_sequence_parallel_group()
    return group


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence; 1 where none are shared."""
    known = registered_mpu()
    return 1 if known is None else int(known.get_sequence_parallel_world_size())


def get_sequence_parallel_rank() -> int:
    """Return this rank's place among those that share its sequences; 0 where none are shared."""
    known = registered_mpu()
    return 0 if known is None else int(known.get_sequence_parallel_rank())


def model_parallel_world_size() -> int:
    """Return 1, the number of ranks that compute a layer together, also under an mpu with more."""
    return 1


def model_parallel_rank() -> int:
    """Return 0, this rank's index among the ranks that compute a layer together, also under an mpu with more."""
    return 0


def no_group() -> dist.ProcessGroup:
    """Raise `UnsupportedError`: there is no such group."""
    raise UnsupportedError("there is no tensor or expert parallelism here; use the group of all ranks")
