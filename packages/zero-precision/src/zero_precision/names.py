"""Names of training dtypes as text, without torch, and the one error of this package."""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    "float64": ("fp64", "float64", "double", "f64"),
    "float32": ("fp32", "float32", "float", "f32"),
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("fp16", "float16", "half", "f16"),
}
"""torch's name of each dtype that a policy may name -> what it may be called, the short name first."""
_SHORT = {alias: aliases[0] for aliases in ALIASES.values() for alias in aliases}


class PrecisionError(ValueError):
    """A dtype, policy, codec argument or loss scale is not valid; the message says what to use instead."""


def short_dtype_name(name: str) -> str:
    """Return the short name of the training dtype called `name`: `bf16` for `"bfloat16"` and `"torch.bfloat16"`.

    Imports no torch. Raises `PrecisionError` for anything that is not the name of a training dtype.
    """
    short = _SHORT.get(name.lower().removeprefix("torch."))
    if short is None:
        raise PrecisionError(f"expected a training dtype ({', '.join(dict.fromkeys(_SHORT.values()))}), got {name!r}")
    return short
