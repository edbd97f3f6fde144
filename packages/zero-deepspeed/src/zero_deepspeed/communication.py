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
"""The default port of rank 0."""

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
    """Initialise torch.distributed and wait for all ranks; return at once if it is initialised already.

    ``dist_backend``: by default gloo for the CPU, and for an accelerator its own backend together with gloo.
    ``timeout``: of collectives; default torch's. Rank and world size come from the launcher's environment, without one
    there is a single rank; ``init_method`` or ``rank`` are passed to torch instead, with ``world_size``. The other
    arguments have no effect: the port comes from the environment too. Raises `UsageError` if ``dist_init_required`` is
    false and torch.distributed is not initialised, and under mpirun without RANK; else as `zero_comm.init`.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise UsageError("dist_init_required is False, but torch.distributed is not initialised; initialise it first")
    device = compute_device()
    backend = _requested_backend(dist_backend, device.type)
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
    """Return this rank's index on its host, by LOCAL_RANK; 0 without that variable."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup:
    """Return the group of all ranks, or raise `UsageError` before `init_distributed`."""
    group = dist.group.WORLD
    if group is None:
        raise UsageError("torch.distributed is not initialised; call init_distributed() first")
    return group


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of the member ``group_rank`` of ``group`` (None: all ranks)."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of the members of ``group`` (None: all ranks)."""
    return dist.get_process_group_ranks(group if group is not None else get_world_group())


def has_all_gather_into_tensor() -> bool:
    """Return True: every torch that is supported has `all_gather_into_tensor`."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True: every torch that is supported has `reduce_scatter_tensor`."""
    return True


def _requested_backend(wanted: str | None, device: str) -> str | None:
    """Return the backend to pass to torch.distributed for the backend ``wanted`` (None: any) on a device of the kind
    ``device``.

    None means the device's default, which `zero_comm.init` combines with gloo: where none is wanted, for an
    accelerator's default itself, and for `ccl`, which torch no longer needs.
    """
    if wanted is None or (device != "cpu" and wanted == dist.get_default_backend_for_device(device)):
        return None
    return None if wanted == "ccl" else wanted
