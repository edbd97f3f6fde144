"""Which ranks share one copy of the model, and which repeat it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .control import Control
from .discovery import discover
from .errors import CommError
from .group import Group
from .ledger import Ledger
from .setup import default_device
from .slices import SliceSum, sum_slices


@dataclass(frozen=True)
class EngineGroups:
    """The three channels of one engine: gathers, reductions and control messages never wait for one another."""

    gather: Group
    reduce: Group
    control: Control

    @classmethod
    def open(
        cls,
        rows: Sequence[Sequence[int]],
        *,
        ledger: Ledger | None = None,
        slice_sum: SliceSum = sum_slices,
        deterministic: bool = False,
    ) -> EngineGroups:
        """The three groups of an engine over each of ``rows`` (global ranks, every rank in one row); returns those of
        this rank's row. Every rank of the world must call it together, with the same rows.
        """
        book = ledger if ledger is not None else Ledger()
        control = Control(open_group(rows, "gloo"), ledger=book)

        def data_group() -> Group:
            return Group(
                open_group(rows),
                ledger=book,
                slice_sum=slice_sum,
                deterministic=deterministic,
                explain=control.explain,
            )

        return cls(gather=data_group(), reduce=data_group(), control=control)

    def abort(self, failure: BaseException, *, when: str = "") -> None:
        """This rank cannot go on: give all three groups back, so that nobody waits for it.

        The others learn ``failure`` and ``when``, unless it is itself that another rank left.
        """
        if isinstance(failure, CommError):
            self.control.close()
        else:
            self.control.abort(f"{type(failure).__name__}: {failure}{when}")
        self.gather.close()
        self.reduce.close()

    def close(self) -> None:
        """Give all three process groups back."""
        self.gather.close()
        self.reduce.close()
        self.control.close()


class Mesh:
    """The world as (replicate, shard): ``shard_size`` consecutive ranks hold one copy of the model between them.

    ``shard_size`` defaults to the world size. `device_mesh` is torch's own mesh with dimensions ``("replicate",
    "shard")``. Raises ValueError when ``shard_size`` does not divide the world size.
    """

    def __init__(self, *, shard_size: int | None = None, device: torch.device | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: call zero_comm.init() first")
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.device = device if device is not None else default_device()
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
        """One copy of the model per node: the shard axis is the ranks of a node, as the launcher's environment says."""
        place = discover()
        known = place is not None and (place.source != "torchrun" or "LOCAL_WORLD_SIZE" in os.environ)
        return cls(shard_size=place.local_world_size if place is not None and known else None, device=device)

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh of shape (replicate, shard); made on first use, on every rank together."""
        if self._device_mesh is None:
            self._device_mesh = DeviceMesh(self.device.type, self._grid, mesh_dim_names=("replicate", "shard"))
        return self._device_mesh

    @property
    def shard_ranks(self) -> list[int]:
        """Global ranks that share this rank's copy of the model, in shard order."""
        return self._grid[self.rank // self.shard_size].tolist()

    @property
    def replicate_ranks(self) -> list[int]:
        """Global ranks that hold the same shard in the other copies."""
        return self._grid[:, self.rank % self.shard_size].tolist()

    def open_groups(
        self, *, ledger: Ledger | None = None, slice_sum: SliceSum = sum_slices, deterministic: bool = False
    ) -> EngineGroups:
        """Make the three groups of one engine over the shard axis; every rank of the world must call it together."""
        return EngineGroups.open(self._grid.tolist(), ledger=ledger, slice_sum=slice_sum, deterministic=deterministic)


def open_group(rows: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make a process group of each of ``rows`` and return this rank's; None where its row is this rank alone.

    Every rank of the world must call it together, with the same rows.
    """
    mine, rank = None, dist.get_rank()
    for row in rows:
        if len(row) > 1:
            group = dist.new_group(list(row), backend=backend)
            if rank in row:
                mine = group
    return mine
