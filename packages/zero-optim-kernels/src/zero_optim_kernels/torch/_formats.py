"""How parameters and moments are stored: names of dtypes, and conversion of a moment from one format to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch

from .._types import Dtype
from ..blocks import Code, dequantize_blocks, quantize_blocks

__all__ = ["BLOCK", "NAMES", "Moment", "StateDtype", "convert", "local", "parse_state_dtype", "storage_dtype"]

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


def _decode(moment: Moment, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(codes.shape, dtype=torch.float32)
    codes, scales = codes.contiguous(), scales.contiguous()
    dequantize_blocks(codes.data_ptr(), scales.data_ptr(), wide.data_ptr(), wide.numel(), code=moment.code, block=BLOCK)
    return wide


def convert(
    moment: Moment, value: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy a saved moment into the format of ``dtype`` (uint8 means 8-bit); returns it and its scales, if it has any.

    Raises ``ValueError`` when 8-bit codes come without their scales.
    """
    if value.dtype == torch.uint8 and scales is None:
        raise ValueError(f"state {moment.name!r} is 8-bit but {moment.scale_name!r} is missing")
    if value.dtype == dtype:
        return value.detach().clone(
            memory_format=torch.contiguous_format
        ), None if scales is None else scales.detach().float().clone()
    wide = value.detach() if scales is None else _decode(moment, value, scales)
    if dtype != torch.uint8:
        return wide.to(dtype, copy=True, memory_format=torch.contiguous_format), None
    wide = wide.to(torch.float32).contiguous()
    codes = torch.empty(wide.shape, dtype=torch.uint8)
    made = torch.empty(-(-wide.numel() // BLOCK), dtype=torch.float32)
    quantize_blocks(wide.data_ptr(), codes.data_ptr(), made.data_ptr(), wide.numel(), code=moment.code, block=BLOCK)
    return codes, made
