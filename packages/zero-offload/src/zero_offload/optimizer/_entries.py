"""Which tensors an optimizer keeps for each parameter, and how they are cut into slices: no memory, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["GRAIN", "KERNEL_DTYPES", "Entry", "Fragment", "cut", "needs_master", "wide_dtype"]

#: Elements: tensors are cut at multiples of this, which is whole pages for every element type.
GRAIN = 4096

KERNEL_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


@dataclass(eq=False)
class Entry:
    """One parameter that is updated, and what is kept for it on the tier."""

    name: str
    param: torch.nn.Parameter
    group: int
    kinds: tuple[str, ...]  # "master" first where there is one, then the moments
    dtype: torch.dtype  # of all kinds
    step: int = 0
    version: int | None = None  # of the weights that the master stands for; None: to be compared
    grad: torch.Tensor | None = None  # on the host, where gradients are offloaded
    grad_ready: bool = False

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.param.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds together."""
        return self.numel * self.dtype.itemsize * len(self.kinds)


@dataclass(frozen=True)
class Fragment:
    """Elements [begin, begin + length) of an entry, flattened."""

    entry: Entry
    begin: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a contiguous tensor of the entry's size."""
        return tensor.view(-1)[self.begin : self.begin + self.length]


def wide_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype in which a parameter is updated."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def needs_master(param: torch.Tensor) -> bool:
    """Whether the weights themselves cannot be updated in place on the host."""
    return param.dtype != wide_dtype(param) or param.device.type != "cpu"


def cut(entries: Sequence[Entry], sub_group_size: int) -> list[tuple[Fragment, ...]]:
    """Slices of at most ``sub_group_size`` elements, in the entries' order; tensors are cut at multiples of `GRAIN`."""
    slices: list[tuple[Fragment, ...]] = []
    current: list[Fragment] = []
    room = sub_group_size
    for entry in entries:
        begin = 0
        while begin < entry.numel:
            length = min(entry.numel - begin, room)
            if begin + length < entry.numel:
                length -= length % GRAIN
            if length > 0:
                current.append(Fragment(entry, begin, length))
                begin += length
                room -= length
            if begin < entry.numel or room == 0:
                slices.append(tuple(current))
                current, room = [], sub_group_size
    return [*slices, tuple(current)] if current else slices
