"""Full weights on their way to another program: names, dtypes and shapes, and how they lie in a bucket.

A bucket is a 1-D uint8 tensor with some weights, one behind the other, each from a multiple of `ALIGNMENT` bytes on.
Sender and receiver compute the same arithmetic here, so a bucket travels in one piece. ``infos`` describe its weights
in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ALIGNMENT = 16
"""Every weight of a bucket begins at a multiple of this many bytes, enough for any dtype."""


@dataclass(frozen=True)
class WeightInfo:
    """The ``name``, ``dtype`` and ``shape`` of one full weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements of the weight."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightBucket:
    """Some full weights, one behind the other in ``memory`` (1-D, uint8), of a pass over all weights in buckets.

    ``number``: of this bucket in its pass, from 0. ``count``: buckets of the pass. Iterating yields (name, tensor); the
    tensors are views of ``memory``, which the next bucket overwrites. ``stop``: ends the pass; a receiver of the
    buckets calls it with its failure when it cannot go on after this bucket. None where nobody has to hear of that.
    """

    number: int
    count: int
    infos: tuple[WeightInfo, ...]
    memory: torch.Tensor
    stop: Callable[[BaseException], object] | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of each weight, in order."""
        return iter(zip((info.name for info in self.infos), bucket_views(self.infos, self.memory), strict=True))


@dataclass(frozen=True)
class WeightSlice:
    """The part of a weight that a rank of a server keeps: ``length`` elements from ``start`` along ``dim``."""

    dim: int
    start: int
    length: int

    def of(self, info: WeightInfo) -> WeightInfo:
        """Return the description of this slice of the weight that ``info`` describes. Raises ValueError if the weight
        has no such slice."""
        inside = 0 <= self.dim < len(info.shape) and 0 <= self.start and self.length >= 0
        if not inside or self.start + self.length > info.shape[self.dim]:
            raise ValueError(f"weight '{info.name}' of shape {info.shape} has no slice {self}")
        shape = (*info.shape[: self.dim], self.length, *info.shape[self.dim + 1 :])
        return WeightInfo(info.name, info.dtype, shape)

    def cut(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the view of ``weight`` (a full weight) that is this slice."""
        return weight.narrow(self.dim, self.start, self.length)


Needs = Mapping[str, WeightSlice | None]
"""The weights that a rank of a server wants, by name: a slice of it, or None for all of it."""


def bucket_offsets(infos: Sequence[WeightInfo]) -> tuple[list[int], int]:
    """Return (first byte of each weight, bytes of the bucket) for a bucket of ``infos``."""
    offsets, end = [], 0
    for info in infos:
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + info.nbytes
    return offsets, end


def bucket_views(infos: Sequence[WeightInfo], memory: torch.Tensor) -> list[torch.Tensor]:
    """Return a view of ``memory`` (1-D, uint8, a bucket of ``infos``) for each weight, in its dtype and shape."""
    offsets, _ = bucket_offsets(infos)
    return [
        memory[offset : offset + info.nbytes].view(info.dtype).view(info.shape)
        for info, offset in zip(infos, offsets, strict=True)
    ]


def plan_buckets(infos: Sequence[WeightInfo], bucket_bytes: int) -> list[tuple[WeightInfo, ...]]:
    """Return ``infos``, in order, divided into buckets of at most ``bucket_bytes``; a larger weight has a bucket of its
    own. Raises ValueError for a bound below 1."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[tuple[WeightInfo, ...]] = []
    current: list[WeightInfo] = []
    end = 0
    for info in infos:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if current and start + info.nbytes > bucket_bytes:
            buckets.append(tuple(current))
            current, start = [], 0
        current.append(info)
        end = start + info.nbytes
    return [*buckets, tuple(current)] if current else buckets


def describe_weights(infos: Sequence[WeightInfo]) -> dict[str, Any]:
    """Return ``infos`` as plain data: ``names``, ``dtype_names`` ("bfloat16") and ``shapes``, three lists."""
    return {
        "names": [info.name for info in infos],
        "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
    }


def read_weights(described: Mapping[str, Any]) -> list[WeightInfo]:
    """Return the weights that ``described`` (as of `describe_weights`) describes; other keys are ignored. Raises
    ValueError for anything else."""
    try:
        rows = list(zip(described["names"], described["dtype_names"], described["shapes"], strict=True))
        infos = [WeightInfo(str(n), getattr(torch, str(d)), tuple(int(size) for size in s)) for n, d, s in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected names, dtype_names and shapes of weights, got {described!r:.200}") from error
    for info in infos:
        if not isinstance(info.dtype, torch.dtype) or min(info.shape, default=0) < 0:
            raise ValueError(f"weight '{info.name}' has dtype {info.dtype} and shape {info.shape}")
    return infos
