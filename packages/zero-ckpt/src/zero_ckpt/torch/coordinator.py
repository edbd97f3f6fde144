"""Ranks that agree through torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..plain import pack, unpack
from ..types import Coordinator, SoloCoordinator
from .buffers import tensor_buffer


class DistCoordinator:
    """A `Coordinator` over a process group that moves CPU tensors (gloo); objects travel as msgpack, never as pickle.

    `group` is None for the default group. Raises CheckpointError when torch.distributed is not initialised, or the
    group cannot move CPU tensors: make one with `torch.distributed.new_group(backend="gloo")`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise CheckpointError("torch.distributed is not initialised; call init_process_group first")
        backend = str(dist.get_backend_config(group))
        if "gloo" not in backend and "mpi" not in backend and "fake" not in backend:
            raise CheckpointError(
                f"the process group's backend {backend!r} does not move CPU tensors; "
                'pass torch.distributed.new_group(backend="gloo")'
            )
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the `obj` of every rank, in rank order; collective, waits for all of them.

        Raises NotPlainDataError for what is not plain data; that is before this rank sends anything, so the others go
        on waiting for it.
        """
        own = torch.frombuffer(bytearray(pack(obj)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([own.numel()]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: own.numel()] = own
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._group)
        return [unpack(tensor_buffer(data[: int(size)])) for data, size in zip(gathered, sizes, strict=True)]

    def barrier(self) -> None:
        """Return once every rank has called it; it is an exchange of `all_gather_object`."""
        self.all_gather_object(None)


def default_coordinator() -> Coordinator:
    """Return a coordinator over the default process group; where torch.distributed is not initialised, one of a single
    process.

    Raises CheckpointError when the group cannot move CPU tensors.
    """
    if dist.is_available() and dist.is_initialized():
        return DistCoordinator()
    return SoloCoordinator()
