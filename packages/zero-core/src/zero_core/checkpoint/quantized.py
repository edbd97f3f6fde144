"""8-bit moments in checkpoints: one code per element, one scale per block of 256 elements.

A tier keeps them as `<moment>` (uint8) and `<moment>_scale`. A checkpoint has them as the kinds `<moment>.<code>`, with
the parameter's shape, and `<moment>.<code>.scale`, of one dimension, so that no reader takes codes for numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zero_ckpt import Checkpoint
from zero_ckpt.torch import tensor_buffer
from zero_optim_kernels import dequantize_blocks

BLOCK = 256
"""Elements that share a scale."""

_SCALE = "_scale"
_SECOND_MOMENTS = frozenset(["exp_avg_sq", "sum"])


class StoredSlice(NamedTuple):
    """Part of a checkpoint's tensor: its kind and full shape, and ``length`` elements from ``offset`` on, flat."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    length: int


def stored_slice(kind: str, dtype: torch.dtype, shape: tuple[int, ...], offset: int, length: int) -> StoredSlice:
    """Return where a checkpoint has elements [``offset``, ``offset`` + ``length``) of a parameter's state on a tier.
    ``kind``, ``dtype``: the tier's, uint8 for 8-bit codes; ``shape``: the full parameter's."""
    if dtype == torch.uint8:
        return StoredSlice(f"{kind}.{format_of(kind)}", shape, offset, length)
    if kind.endswith(_SCALE):
        moment = kind.removesuffix(_SCALE)
        blocks = -(-torch.Size(shape).numel() // BLOCK)
        return StoredSlice(f"{moment}.{format_of(moment)}.scale", (blocks,), offset // BLOCK, -(-length // BLOCK))
    return StoredSlice(kind, shape, offset, length)


def format_of(moment: str) -> str:
    """Return the 8-bit format of the moment ``moment``: "u5e3" (unsigned) for second moments, else "e4m3"."""
    return "u5e3" if moment in _SECOND_MOMENTS else "e4m3"


def quantized_moments(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return the names of the moments of the parameter ``name`` that the checkpoint has quantized."""
    split = [kind.rpartition(".") for stored, kind in checkpoint.tensors if stored == name]
    return [moment for moment, dot, code in split if dot and code == format_of(moment)]


def read_dequantized(checkpoint: Checkpoint, name: str, moment: str, offset: int, length: int) -> torch.Tensor:
    """Return elements [``offset``, ``offset`` + ``length``) of a quantized moment as a 1-D float32 tensor on the
    CPU."""
    code = format_of(moment)
    numel = torch.Size(checkpoint.tensors[name, f"{moment}.{code}"].shape).numel()
    begin = offset // BLOCK * BLOCK
    end = min(numel, -(-(offset + length) // BLOCK) * BLOCK)
    codes = torch.empty(end - begin, dtype=torch.uint8)
    scales = torch.empty(-(-(end - begin) // BLOCK), dtype=torch.float32)
    checkpoint.read_into(name, f"{moment}.{code}", begin, tensor_buffer(codes))
    checkpoint.read_into(name, f"{moment}.{code}.scale", begin // BLOCK, tensor_buffer(scales))
    numbers = torch.empty(end - begin, dtype=torch.float32)
    dequantize_blocks(
        codes.data_ptr(),
        scales.data_ptr(),
        numbers.data_ptr(),
        len(numbers),
        code="u5e3" if code == "u5e3" else "e4m3",
        block=BLOCK,
    )
    return numbers[offset - begin : offset - begin + length]
