"""Initialise torch.distributed if it is not initialised yet."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from .discovery import discover, local_rank
from .leaving import keep_where_forked
from .store import open_store


def init(
    device: torch.device | str | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> None:
    """Initialise torch.distributed for ``device`` unless it is already initialised.

    ``device``: the compute device; by default the machine's accelerator, else the CPU. ``backend``: default gloo for
    the CPU, and for an accelerator its own backend with gloo beside it for control messages. ``timeout``: of
    collectives; default torch's. The rank comes from the environment that the launcher sets (see `discover`: torchrun,
    zero-launch, Open MPI, PMI, Slurm, Kubernetes); without one the world is this single rank. Changes no environment
    variable. Returns once all ranks are connected; after 5 s the log says how many have not come to the ranks' store
    (through which torch connects them), and where it is. Raises ValueError when the ranks are on several hosts and
    nothing says where rank 0 is, OSError when rank 0 cannot listen there, and PeerError when ranks do not come within
    ``timeout``.
    """
    if dist.is_initialized():
        keep_where_forked()
        return
    where = torch.device(device) if device is not None else default_device()
    chosen = backend or _backend_for(where)
    place = discover()
    if place is None:
        dist.init_process_group(chosen, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    else:
        store = open_store(place, timeout)
        dist.init_process_group(chosen, timeout=timeout, store=store, rank=place.rank, world_size=place.world_size)
    keep_where_forked()
    await_connections()


def await_connections() -> None:
    """Wait until every rank of the default process group has connected to the others. Collective, by one all-reduce;
    does nothing for a single rank, or without gloo, which alone needs that.

    A rank has its own connections before the others have theirs. One that ended at that moment would make
    `init_process_group` fail on those ("Connection closed by peer").
    """
    backends = dist.get_backend_config().split(",")
    if dist.get_world_size() > 1 and {"gloo", "cpu:gloo"} & set(backends):
        dist.all_reduce(torch.zeros(1))


def default_device(device: torch.device | None = None) -> torch.device:
    """Return this rank's compute device: the accelerator whose index is this rank's local rank (modulo the number of
    accelerators), or the CPU on a machine without accelerators. ``device``, if given, is returned instead; an
    accelerator without an index gets this one. Raises ValueError as `discover` does."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        device = torch.device("cpu" if kind is None else kind.type)
    if kind is None or device.type != kind.type or device.index is not None:
        return device
    return torch.device(kind.type, local_rank() % torch.accelerator.device_count())


def _backend_for(device: torch.device) -> str:
    """Return the ``backend`` argument of `init_process_group` for tensors on ``device``: with gloo for CPU tensors in
    any case."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
