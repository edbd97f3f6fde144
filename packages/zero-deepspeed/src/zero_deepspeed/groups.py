"""`deepspeed.utils.groups` and `parallel_state_sp`: the groups of the mpu; without one all ranks, or one rank.

The mpu (Megatron's model-parallel unit) is an object whose methods say which ranks share a sequence or compute a layer
together. As in DeepSpeed the functions here answer for the one that `initialize` was given last (`register_mpu`).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zero_core.errors import UsageError
from zero_sequence import SequenceGroups

from .communication import get_world_group
from .errors import UnsupportedError

_REGISTERED: list[tuple[Any, Any]] = []
"""The mpu, with torch's group of all ranks for which it was made; empty without one."""


def register_mpu(mpu: Any) -> None:
    """Make the functions of this module answer for ``mpu`` until another is registered or torch.distributed is closed.

    ``mpu`` must have the method ``get_data_parallel_group()``; if its ranks share sequences or layers, it has the
    methods that `SequenceGroups` has for these too.
    """
    _REGISTERED[:] = [(mpu, dist.group.WORLD)]


def registered_mpu() -> Any:
    """Return the mpu that was registered last; None without one, or after torch.distributed was closed."""
    return _REGISTERED[0][0] if _REGISTERED and _REGISTERED[0][1] is dist.group.WORLD else None


def open_sequence_groups(size: int) -> SequenceGroups:
    """Return the `SequenceGroups` in which every ``size`` consecutive ranks share a sequence: the registered ones, or
    new ones, which are registered. Collective.

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
    """Return the mpu's data-parallel group, of ranks that have samples of their own; without an mpu that of all ranks.
    Raises `UsageError` before torch.distributed is initialised."""
    known = registered_mpu()
    return get_world_group() if known is None else known.get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in `get_data_parallel_group`. Raises `UsageError` before torch.distributed is
    initialised."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """Return this process's rank in `get_data_parallel_group`. Raises `UsageError` before torch.distributed is
    initialised."""
    return dist.get_rank(get_data_parallel_group())


def get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the group over which states are sharded: that of data times sequence if the mpu has one, else
    `get_data_parallel_group`. Raises `UsageError` before torch.distributed is initialised."""
    ask = getattr(registered_mpu(), "get_sequence_data_parallel_group", get_data_parallel_group)
    group: dist.ProcessGroup = ask()
    return group


def get_sequence_data_parallel_world_size() -> int:
    """Return the number of ranks in `get_sequence_data_parallel_group`. Raises `UsageError` before torch.distributed is
    initialised."""
    return dist.get_world_size(get_sequence_data_parallel_group())


def get_sequence_data_parallel_rank() -> int:
    """Return this process's rank in `get_sequence_data_parallel_group`. Raises `UsageError` before torch.distributed is
    initialised."""
    return dist.get_rank(get_sequence_data_parallel_group())


def get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks that share this rank's sequences. Raises `UsageError` if no mpu has one."""
    known = registered_mpu()
    if not hasattr(known, "get_sequence_parallel_group"):
        raise UsageError(
            "no ranks share a sequence yet: call UlyssesSPAttentionHF.register_with_transformers, or initialize with "
            "an mpu that has get_sequence_parallel_group"
        )
    group: dist.ProcessGroup = known.get_sequence_parallel_group()
    return group


def get_sequence_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence; 1 where none are shared."""
    return int(getattr(registered_mpu(), "get_sequence_parallel_world_size", lambda: 1)())


def get_sequence_parallel_rank() -> int:
    """Return this rank's index among the ranks that share its sequences; 0 where none are shared."""
    return int(getattr(registered_mpu(), "get_sequence_parallel_rank", lambda: 0)())


def model_parallel_world_size() -> int:
    """Return the number of ranks that compute a layer together, as the mpu says; 1 without one."""
    return int(_of_model_parallel("world_size", 1))


def model_parallel_rank() -> int:
    """Return this rank's index among those that compute a layer together, as the mpu says; 0 without one."""
    return int(_of_model_parallel("rank", 0))


def model_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks that compute a layer together. Raises `UnsupportedError` if no mpu has one."""
    group: dist.ProcessGroup | None = _of_model_parallel("group", None)
    return no_group() if group is None else group


def _of_model_parallel(what: str, otherwise: Any) -> Any:
    """Return ``what`` ("group", "rank", "world_size") of the mpu's model-parallel group, by the first of the methods
    get_tensor_model_parallel_X, get_slice_parallel_X and get_model_parallel_X that the mpu has; ``otherwise`` without
    such a method."""
    known = registered_mpu()
    for prefix in ("get_tensor_model_parallel_", "get_slice_parallel_", "get_model_parallel_"):
        if hasattr(known, prefix + what):
            return getattr(known, prefix + what)()
    return otherwise


def no_group() -> dist.ProcessGroup:
    """Raise `UnsupportedError`, for every group of expert parallelism, and of tensor parallelism without an mpu."""
    raise UnsupportedError(
        "there is no expert parallelism here, and tensor parallelism only with initialize(mpu=…): use the group of all "
        "ranks"
    )
