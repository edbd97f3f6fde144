"""Change the dtype of raw elements, with NumPy (imported only when something has to change)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
NAMES = {"fp32": "F32", "float32": "F32", "bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16"}
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


def output_dtype(stored: str, wanted: str | None) -> str:
    """Return the dtype to write: `wanted` for floating-point tensors, the stored one for all others or where `wanted`
    is None."""
    return wanted if wanted is not None and stored in FLOATS else stored


def convert_dtype(data: Buffer, stored: str, wanted: str) -> memoryview:
    """Return elements of dtype `stored` as `wanted`, rounded to nearest, ties to even (F64 to BF16 by way of F32).

    Equal dtypes give a view of `data` itself, others new memory. What is too large becomes infinite. Raises
    CheckpointError unless both are in `FLOATS` or equal.
    """
    if stored == wanted:
        return memoryview(data).cast("B")
    if stored not in FLOATS or wanted not in FLOATS:
        raise CheckpointError(f"{stored} cannot be converted to {wanted}")
    import numpy

    values: Any = _to_numpy(numpy, data, stored)
    with numpy.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite, as it does in torch
        changed: Any = values.astype(_NUMPY.get(wanted, "<f4"), copy=False)
    changed = _to_bfloat16(numpy, changed) if wanted == "BF16" else numpy.ascontiguousarray(changed)
    return memoryview(changed).cast("B")


def _to_numpy(numpy: Any, data: Buffer, stored: str) -> Any:
    """Return the elements in `data`, of dtype `stored`, as an array of the same values; BF16, which NumPy lacks, as
    F32.
    """
    if stored != "BF16":
        return numpy.frombuffer(data, dtype=_NUMPY[stored])
    return (numpy.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")


def _to_bfloat16(numpy: Any, values: Any) -> Any:
    """Return the BF16 bits of an array of F32 values as 16-bit integers, rounded to nearest, ties to even; NaN stays
    NaN."""
    bits = values.view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype("<u4")) >> 16
    return numpy.where(numpy.isnan(values), 0x7FC0 | ((bits >> 16) & 0x8000), rounded).astype("<u2")
