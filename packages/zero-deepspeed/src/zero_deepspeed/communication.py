"""`deepspeed.comm`: torch.distributed, started by DeepSpeed's call."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zero_comm import await_connections, init
from zero_core.errors import UsageError

from .accelerator import compute_device

DEFAULT_PORT = 29500
"""The port of rank 0 where nobody names one."""

_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise torch.distributed unless it is initialised already.

    ``dist_backend``: by default gloo for the CPU, and an accelerator's own with gloo beside it. Ranks come from the
    launcher's environment, else there is one; ``init_method``, ``rank`` and ``world_size`` go to torch as they are.
    Raises `UsageError` when ``dist_init_required`` is false and nobody has, and under mpirun without RANK.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required is False, but torch.distributed is not initialised; initialise it first")
    device = compute_device()
    backend = _backend(dist_backend, device.type)
    if init_method is not None or rank >= 0:
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)
        await_connections()
        return
    many = next((name for name in _MPI if int(os.environ.get(name, "1")) > 1), None)
    if many is not None and "RANK" not in os.environ:
        raise UsageError(
            f"{many} says that mpirun has started several ranks, but RANK and WORLD_SIZE are not set; start them with "
            "zero-launch or torchrun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    init(device, backend=backend, timeout=timeout)


def get_local_rank() -> int:
    """This rank's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise UsageError("torch.distributed is not initialised; call init_distributed() first")
    return group


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """The rank, among all, of a group's member."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """The ranks, among all, of a group's members."""
    return dist.get_process_group_ranks(group if group is not None else get_world_group())


def has_all_gather_into_tensor() -> bool:
    """True."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True."""
    return True


def _backend(wanted: str | None, device: str) -> str | None:
    """None for the usual one of the device, which has gloo beside it for control messages."""
    if wanted is None or (device != "cpu" and wanted == dist.get_default_backend_for_device(device)):
        return None
    return None if wanted == "ccl" else wanted
