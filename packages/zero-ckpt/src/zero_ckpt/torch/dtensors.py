"""Where the local part of a tensor lies in the full tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError


@dataclass(frozen=True)
class ContiguousRun:
    """A run of `length` elements that are consecutive in the local part and in the full tensor: from `local` on in the
    flattened local part, from `whole` on in the flattened full tensor."""

    local: int
    whole: int
    length: int


def local_part(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, list[ContiguousRun]]:
    """Return (this rank's part of a tensor, its runs in the full tensor). The part of a DTensor is its local tensor,
    that of a plain tensor the tensor itself, in one run.

    There are no runs where this rank is not in the mesh or holds no element. `name` is for errors. Raises
    CheckpointError for placements other than `Shard` and `Replicate`.
    """
    if not _is_dtensor(tensor):
        return tensor, [ContiguousRun(0, 0, tensor.numel())]
    local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    box = _local_box(tensor, name)
    if box is None:
        return local, []
    begins, sizes = box
    if tuple(local.shape) != tuple(sizes):
        raise CheckpointError(
            f"{name!r}: this rank holds shape {tuple(local.shape)}, its placements say {tuple(sizes)}"
        )
    return local, list(_runs(list(tensor.shape), begins, sizes))


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def _local_box(tensor: Any, name: str) -> tuple[list[int], list[int]] | None:
    """Return (begins, sizes) of the local part of a DTensor, each with one number per dimension; None where this rank
    is not in the tensor's mesh.

    Raises CheckpointError, naming `name`, for placements other than `Shard` and `Replicate`.
    """
    from torch.distributed.tensor import Replicate, Shard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    begins, sizes = [0] * tensor.ndim, list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            dim, ranks = placement.dim, tensor.device_mesh.size(axis)
            chunk = -(-sizes[dim] // ranks)
            begin = min(coordinate[axis] * chunk, sizes[dim])
            sizes[dim] = min(chunk, sizes[dim] - begin)
            begins[dim] += begin
        elif type(placement) is not Replicate:
            raise CheckpointError(
                f"{name!r} is placed as {placement}; only Shard and Replicate can be saved and loaded"
            )
    return begins, sizes


def _runs(shape: list[int], begins: list[int], sizes: list[int]) -> Iterator[ContiguousRun]:
    """Yield the runs of consecutive elements that make up a box in a tensor of `shape`, in order. `begins` and `sizes`
    are the box's, one number per dimension."""
    if 0 in sizes:
        return
    split = max((dim for dim in range(len(shape)) if sizes[dim] != shape[dim]), default=0)
    strides = [1] * (len(shape) + 1)
    for dim in reversed(range(len(shape))):
        strides[dim] = strides[dim + 1] * shape[dim]
    length = strides[split + 1] * sizes[split] if shape else 1
    local = 0
    for index in itertools.product(*(range(size) for size in sizes[:split])):
        position = (*index, 0)
        whole = sum((begins[dim] + at) * strides[dim + 1] for dim, at in enumerate(position)) if shape else 0
        yield ContiguousRun(local, whole, length)
        local += length
