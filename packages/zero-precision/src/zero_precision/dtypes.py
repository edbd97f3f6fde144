"""Training dtypes and their names."""

from __future__ import annotations

import torch

from zero_precision.names import ALIASES, PrecisionError, short_dtype_name

_SHORT: dict[torch.dtype, str] = {getattr(torch, name): aliases[0] for name, aliases in ALIASES.items()}
_BY_SHORT = {short: dtype for dtype, short in _SHORT.items()}

TRAINING_DTYPES = tuple(_SHORT)
"""The dtypes that a policy may name: float64, float32, bfloat16 and float16."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a training dtype: `fp64`, `fp32`, `bf16` or `fp16`; torch's own name for any other."""
    return _SHORT[dtype] if dtype in _SHORT else str(dtype).removeprefix("torch.")


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the training dtype that `name` stands for: `"bf16"`, `"bfloat16"`, `"torch.bfloat16"`, `"BF16"` and the
    like; a torch dtype stands for itself.

    Raises `PrecisionError` for anything that is not a training dtype."""
    if isinstance(name, torch.dtype):
        if name in _SHORT:
            return name
        raise PrecisionError(f"expected a training dtype ({', '.join(_BY_SHORT)}), got {name!r}")
    return _BY_SHORT[short_dtype_name(str(name))]


def itemsize(dtype: torch.dtype | None) -> int:
    """Return the bytes of one element of `dtype`; 0 for None."""
    return 0 if dtype is None else dtype.itemsize
