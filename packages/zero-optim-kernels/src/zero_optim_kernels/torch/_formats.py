"""Formats of parameters and moments: names of dtypes, and conversion of a moment from one format to another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch

from .._types import Dtype
from ..blocks import Code, dequantize_blocks, quantize_blocks

__all__ = [
    "BLOCK",
    "NAMES",
    "Moment",
    "StateDtype",
    "decode",
    "encode",
    "local",
    "parse_state_dtype",
    "storage_dtype",
    "zero_moment",
    "zero_scales",
]

BLOCK = 256
StateDtype = Literal["f32", "bf16", "int8"]

NAMES: dict[torch.dtype, Dtype] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}
_STATE_NAMES: dict[object, StateDtype] = {
    "f32": "f32",
    "float32": "f32",
    "fp32": "f32",
    torch.float32: "f32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    torch.bfloat16: "bf16",
    "int8": "int8",
    "8bit": "int8",
    torch.int8: "int8",
}


@dataclass(frozen=True)
class Moment:
    """One moment of an optimizer: its key in the state, and whether it is a second moment (never negative)."""

    name: str
    second: bool

    @property
    def scale_name(self) -> str:
        """The key of its scales in 8-bit state."""
        return f"{self.name}_scale"

    @property
    def code(self) -> Code:
        """Its 8-bit format."""
        return "u5e3" if self.second else "e4m3"


def parse_state_dtype(value: object) -> StateDtype:
    """The kernel's name of a ``state_dtype`` argument. Raises ``ValueError`` for anything else."""
    found = _STATE_NAMES.get(value) if isinstance(value, (str, torch.dtype)) else None
    if found is None:
        raise ValueError(f"state_dtype: expected 'float32', 'bfloat16' or 'int8', got {value!r}")
    return found


def storage_dtype(param: torch.Tensor, state_dtype: StateDtype) -> torch.dtype:
    """The dtype of a moment's tensor; float64 parameters have float64 moments."""
    if param.dtype == torch.float64:
        return torch.float64
    return {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[state_dtype]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(torch.Tensor, to_local())


def zero_moment(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor like the parameter, sharded as it is."""
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)


def zero_scales(param: torch.Tensor) -> torch.Tensor:
    """Float32 zeros, one for each block of this rank's part of the parameter.

    Those of a DTensor are one too, so that whoever saves state by its placements saves every rank's. It has one axis
    for each mesh axis that shards the parameter, and a last one of as many blocks as the largest part has; so scales
    of another sharding, which belong to other blocks, have another shape.
    """
    if not hasattr(param, "to_local"):
        return torch.zeros(-(-param.numel() // BLOCK))
    from torch.distributed import tensor as distributed

    whole = cast(distributed.DTensor, param)
    mesh, largest = whole.device_mesh, list(whole.shape)
    axes: list[int] = []
    placements: list[distributed.Placement] = []
    for axis, placement in enumerate(whole.placements):
        dim: int | None = getattr(placement, "dim", None)  # of every way to shard
        if dim is None:
            placements.append(distributed.Replicate())
            continue
        largest[dim] = -(-largest[dim] // mesh.size(axis))
        placements.append(distributed.Shard(len(axes)))
        axes.append(mesh.size(axis))
    scales = distributed.zeros(*axes, -(-math.prod(largest) // BLOCK), device_mesh=mesh, placements=placements)
    return scales.to(local(param).device)


def _address(tensor: torch.Tensor) -> int:
    return local(tensor).data_ptr()


def decode(moment: Moment, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values of this rank's part of an 8-bit moment."""
    own = local(codes).contiguous()
    wide = torch.empty(own.shape, dtype=torch.float32)
    dequantize_blocks(_address(own), _address(scales), _address(wide), wide.numel(), code=moment.code, block=BLOCK)
    return wide


def encode(moment: Moment, wide: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write this rank's part of an 8-bit moment from its float32 values."""
    wide = wide.to(torch.float32).contiguous()
    quantize_blocks(_address(wide), _address(codes), _address(scales), wide.numel(), code=moment.code, block=BLOCK)
