"""Formats of parameters and moments: names of dtypes, creation of moments, conversion between 8 bits and float32."""

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
    "check_shape",
    "decode",
    "encode",
    "local",
    "parse_state_dtype",
    "storage_dtype",
    "zero_moment",
    "zero_scales",
    "zero_state",
]

BLOCK = 256  # elements of 8-bit state that share a scale
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
    """A moment of an optimizer: its key in the state, and ``second`` for a second moment (never negative)."""

    name: str
    second: bool

    @property
    def scale_name(self) -> str:
        """The key in the state of the scales that belong to this moment when it is stored in 8 bits."""
        return f"{self.name}_scale"

    @property
    def code(self) -> Code:
        """Return the code of `quantize_blocks` for 8-bit state: "u5e3", unsigned, for a second moment, else "e4m3"."""
        return "u5e3" if self.second else "e4m3"


def parse_state_dtype(value: object) -> StateDtype:
    """Return the kernels' name of the dtype in a ``state_dtype`` argument, which is a name or a torch dtype. Raises
    ``ValueError`` for one that is not supported."""
    found = _STATE_NAMES.get(value) if isinstance(value, (str, torch.dtype)) else None
    if found is None:
        raise ValueError(f"state_dtype: expected 'float32', 'bfloat16' or 'int8', got {value!r}")
    return found


def storage_dtype(param: torch.Tensor, state_dtype: StateDtype) -> torch.dtype:
    """Return the dtype in which a moment of ``param`` is stored: float64 for a float64 parameter, else as
    ``state_dtype`` says, with uint8 for 8-bit state."""
    if param.dtype == torch.float64:
        return torch.float64
    return {"f32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[state_dtype]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(torch.Tensor, to_local())


def zero_moment(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of the parameter's shape in ``dtype``, contiguous; for a DTensor, a DTensor sharded as it is."""
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)


def zero_state(moment: Moment, param: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the entries of a parameter's state for a moment whose elements are all zero, by key: the moment in
    ``dtype`` and, if that is uint8, its scales."""
    entries = {moment.name: zero_moment(param, dtype)}
    if dtype == torch.uint8:
        entries[moment.scale_name] = zero_scales(param)
    return entries


def check_shape(name: str, value: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ``ValueError`` unless ``value``, a saved tensor, has the shape of ``like``, both in full and in this rank's
    shard. ``name``: its key in the state, for the error."""
    if value.shape == like.shape and local(value).shape == local(like).shape:
        return
    raise ValueError(
        f"state {name!r}: expected shape {tuple(like.shape)}, of it {tuple(local(like).shape)} on this rank, got "
        f"{tuple(value.shape)} and {tuple(local(value).shape)}; 8-bit state loads with the sharding that it was saved "
        "with, any other state once it is sharded as its parameter is"
    )


def zero_scales(param: torch.Tensor) -> torch.Tensor:
    """Return float32 zeros, one for each block of this rank's shard of the parameter.

    For a DTensor they are a DTensor too, so that a checkpoint that saves tensors by their placements saves the scales
    of every rank. It has one axis for each mesh axis that shards the parameter, and a last axis with the number of
    blocks in the largest shard. Thus scales for another sharding, which has other blocks, have another shape.
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
    """Return the address of the first element of this rank's shard, valid while the tensor keeps its storage."""
    return local(tensor).data_ptr()


def decode(moment: Moment, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of this rank's shard of an 8-bit moment (``codes``, ``scales``) in a new tensor of its
    shape.
    """
    own = local(codes).contiguous()
    wide = torch.empty(own.shape, dtype=torch.float32)
    dequantize_blocks(_address(own), _address(scales), _address(wide), wide.numel(), code=moment.code, block=BLOCK)
    return wide


def encode(moment: Moment, wide: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise ``wide``, of any floating dtype, and write this rank's shard of an 8-bit moment, ``codes`` (uint8) and
    ``scales`` (float32).
    """
    wide = wide.to(torch.float32).contiguous()
    quantize_blocks(_address(wide), _address(codes), _address(scales), wide.numel(), code=moment.code, block=BLOCK)
