"""Ranks that agree through torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, NotPlainDataError
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

        Raises NotPlainDataError on every rank, with the causes by rank, when what any rank gives is not plain data.
        """
        failure: Exception | None = None
        try:
            body = pack(obj)
        except Exception as error:  # the other ranks wait for an answer
            failure, body = error, str(error).encode(errors="replace")
        bodies, have_failed = self._all_gather_bytes(body, failure is not None)
        if causes := {rank: str(bodies[rank], "utf-8") for rank, failed in enumerate(have_failed) if failed}:
            raise NotPlainDataError("the ranks could not exchange objects", causes) from failure
        return list(map(unpack, bodies))

    def _all_gather_bytes(self, body: bytes, failed: bool) -> tuple[list[memoryview], list[bool]]:
        """Return two lists, by rank: the bytes `body` and the mark `failed` of every rank; collective."""
        own = torch.frombuffer(bytearray(body or b"\0"), dtype=torch.uint8)
        told = [torch.zeros(2, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(told, torch.tensor([len(body), int(failed)]), group=self._group)
        sizes = [int(size) for size, _ in told]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._group)
        found = [tensor_buffer(data[:size]) for data, size in zip(gathered, sizes, strict=True)]
        return found, [bool(mark) for _, mark in told]

    def barrier(self) -> None:
        """Return once every rank has called this; the ranks exchange empty messages."""
        self.all_gather_object(None)


def default_coordinator() -> Coordinator:
    """Return a coordinator over the default process group, or, where torch.distributed is not initialised, one for a
    single process.

    Raises CheckpointError when the group cannot move CPU tensors.
    """
    if dist.is_available() and dist.is_initialized():
        return DistCoordinator()
    return SoloCoordinator()
