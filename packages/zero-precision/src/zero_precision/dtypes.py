"""Names of floating dtypes, and the one error of this package."""

from __future__ import annotations

import torch

_ALIASES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float64: ("fp64", "float64", "double", "f64"),
    torch.float32: ("fp32", "float32", "float", "f32"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half", "f16"),
}
_BY_NAME = {alias: dtype for dtype, aliases in _ALIASES.items() for alias in aliases}

TRAINING_DTYPES = tuple(_ALIASES)
"""The dtypes that a policy may name: float64, float32, bfloat16 and float16."""


class PrecisionError(ValueError):
    """A dtype, policy, codec argument or loss scale is not valid; the message says what to use instead."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a training dtype: `fp64`, `fp32`, `bf16` or `fp16`; torch's own name for any other."""
    return _ALIASES[dtype][0] if dtype in _ALIASES else str(dtype).removeprefix("torch.")


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the training dtype called `name`: `"bf16"`, `"bfloat16"`, `"torch.bfloat16"`, `"BF16"` and the like.

    A dtype is returned as it is. Raises `PrecisionError` for anything that is not a training dtype.
    """
    if isinstance(name, torch.dtype):
        dtype: torch.dtype | None = name if name in _ALIASES else None
    else:
        dtype = _BY_NAME.get(str(name).lower().removeprefix("torch."))
    if dtype is None:
        known = ", ".join(aliases[0] for aliases in _ALIASES.values())
        raise PrecisionError(f"expected a training dtype ({known}), got {name!r}")
    return dtype


def itemsize(dtype: torch.dtype | None) -> int:
    """Return the bytes of one element of `dtype`; 0 for None."""
    return 0 if dtype is None else dtype.itemsize
