"""Start torch.distributed when nobody has."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


def init(
    device: torch.device | str | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> None:
    """Initialise torch.distributed for ``device`` unless it is already initialised.

    ``device``: the compute device; by default the machine's accelerator, else the CPU. ``backend``: overrides the
    choice (gloo for the CPU; on an accelerator its own backend with gloo beside it for control messages). Ranks come
    from the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without it a group of one rank is
    made. Changes no environment variable.
    """
    if dist.is_initialized():
        return
    where = torch.device(device) if device is not None else default_device()
    chosen = backend or _backend_for(where)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(chosen, timeout=timeout)
    else:
        dist.init_process_group(chosen, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def default_device() -> torch.device:
    """This rank's compute device: accelerator number LOCAL_RANK when there is one, else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def _backend_for(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
