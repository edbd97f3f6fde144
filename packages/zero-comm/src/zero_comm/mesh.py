"""The two-dimensional mesh: ranks that shard one replica of the model, times the replicas."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .discovery import discover
from .ledger import Ledger
from .process_groups import EngineGroups
from .setup import default_device
from .slices import SliceSum, sum_slices


class Mesh:
    """The world as (replicate, shard): each ``shard_size`` consecutive ranks shard one replica of the model.

    ``shard_size`` defaults to the world size. ``device``: default this rank's accelerator, or the CPU
    (`default_device`). Raises RuntimeError before torch.distributed is initialised, and ValueError when ``shard_size``
    does not divide the world size.

    Attributes:
        rank, world_size: this rank in the world, and the number of all ranks.
        device: this rank's compute device.
        shard_size: ranks that shard one replica.
    """

    def __init__(self, *, shard_size: int | None = None, device: torch.device | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call zero_comm.init() first")
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.device = default_device(device)
        self.shard_size = self.world_size if shard_size is None else shard_size
        if self.shard_size < 1 or self.world_size % self.shard_size:
            raise ValueError(
                f"shard_size must divide the world size {self.world_size}, got {self.shard_size}; "
                f"possible sizes: {[n for n in range(1, self.world_size + 1) if self.world_size % n == 0]}"
            )
        grid = torch.arange(self.world_size).view(-1, self.shard_size)
        self._grid = grid
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def node_local(cls, *, device: torch.device | None = None) -> Mesh:
        """Return the mesh with one replica per node: its shard size is the number of ranks on this host, as the
        launcher's environment gives it. Without that number there is one replica over the whole world. ``device``: as
        for the class. Raises as the class and `discover` do."""
        place = discover()
        known = place is not None and (place.source != "torchrun" or "LOCAL_WORLD_SIZE" in os.environ)
        return cls(shard_size=place.local_world_size if place is not None and known else None, device=device)

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh of shape (replicate, shard). The first access makes it, which is collective."""
        if self._device_mesh is None:
            self._device_mesh = DeviceMesh(self.device.type, self._grid, mesh_dim_names=("replicate", "shard"))
        return self._device_mesh

    @property
    def shard_ranks(self) -> list[int]:
        """Global ranks that shard the same replica as this rank, in shard order."""
        return self._grid[self.rank // self.shard_size].tolist()

    @property
    def replicate_ranks(self) -> list[int]:
        """Global ranks that hold this rank's shard, itself included, in the order of the replicas."""
        return self._grid[:, self.rank % self.shard_size].tolist()

    def open_groups(
        self,
        *,
        ledger: Ledger | None = None,
        slice_sum: SliceSum = sum_slices,
        deterministic: bool = False,
        ranks_per_node: int | None = None,
    ) -> EngineGroups:
        """Open and return the process groups of one engine: gathers over the shard axis, reductions over both axes,
        control messages over all ranks. Collective over the world. See `EngineGroups.open` for arguments and errors."""
        return EngineGroups.open(
            [list(range(self.world_size))],
            ledger=ledger,
            slice_sum=slice_sum,
            deterministic=deterministic,
            ranks_per_node=ranks_per_node,
            shard_size=self.shard_size,
        )
