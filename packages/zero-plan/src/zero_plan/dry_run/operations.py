"""Floating-point operations by the dtype that they compute in, as torch's own counter counts them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_ON_CPU: dict[Any, tuple[Any, int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (_aten._scaled_dot_product_flash_attention, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (_aten._scaled_dot_product_flash_attention_backward, 7),
}
"""An operation of the CPU alone -> the accelerators' operation with the same cost, and the index of ``is_causal`` among
the arguments."""


def _grouped_product_flops(one: torch.Tensor, other: torch.Tensor, *_more: Any, **_named: Any) -> int:
    """Return the FLOPs of ``torch._grouped_mm(one, other, …)``: of a product of matrices, each with its group of rows,
    columns or contracted elements, in which every element of ``one`` (of ``other``, where the columns are grouped) is
    multiplied as often as the product has columns (rows)."""
    if other.dim() == 2 and one.dim() == 3:
        return 2 * other.numel() * one.size(1)
    return 2 * one.numel() * other.size(-1)


_WITHOUT_FORMULA: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: _grouped_product_flops,  # the experts of Transformers' mixtures
}


class Operations:
    """Counts the floating-point operations of matrix products, convolutions and attention; causal attention counts
    half.

    Attributes:
        flops_by_dtype: floating-point operations since the last `clear`, by the name of the dtype they compute in.
    """

    def __init__(self) -> None:
        self.flops_by_dtype: Counter[str] = Counter()

    def clear(self) -> None:
        """Set all counts to 0."""
        self.flops_by_dtype.clear()

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs of an executed operation to the count of its first argument's dtype; add nothing for operations
        that torch has no formula for.
        """
        formula, place = _formula_of(func)
        if formula is None:
            return
        flops = formula(*args, **(kwargs or {}), out_val=result)
        causal = place >= 0 and len(args) > place and bool(args[place])
        self.flops_by_dtype[str(args[0].dtype).removeprefix("torch.")] += flops // 2 if causal else flops


@functools.cache
def _formula_of(func: Any) -> tuple[Callable[..., int] | None, int]:
    """Return the formula of an operation's FLOPs, None if there is none, and the index of ``is_causal`` among its
    arguments, -1 if it has none."""
    packet = getattr(func, "overloadpacket", None)
    found, place = _ON_CPU.get(packet, (packet, -1))
    return flop_registry.get(found) or _WITHOUT_FORMULA.get(packet), place
