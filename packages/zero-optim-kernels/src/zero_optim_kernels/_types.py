"""The types of the public signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Count", "Dtype", "Operand", "Operands", "Segment"]

Dtype = Literal["f32", "bf16", "f16", "f64", "int8"]
#: An address, or an object with a C-contiguous buffer.
Operand: TypeAlias = "int | Buffer"
#: One operand, or a list with one operand for each tensor.
Operands: TypeAlias = "Operand | Sequence[Operand]"
#: A number of elements, or a list with that of each tensor.
Count: TypeAlias = "int | Sequence[int]"
#: (end, lr, weight_decay, beta1, beta2): the hyperparameters of the elements before ``end``; see `steps`.
Segment = tuple[int, float, float, float, float]
