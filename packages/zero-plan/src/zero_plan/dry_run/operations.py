"""Floating-point operations by the dtype that they compute in, as torch's own counter counts them, and the bytes that
other operations move."""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
    """Return the FLOPs of ``torch._grouped_mm(one, other, …)``: of many products of matrices at once, one for each
    group of rows, of columns or of contracted elements.

    Every element of ``one`` (of ``other``, if the columns are grouped) is multiplied as often as the result has columns
    (rows). Other arguments are ignored.
    """
    if other.dim() == 2 and one.dim() == 3:
        return 2 * other.numel() * one.size(1)
    return 2 * one.numel() * other.size(-1)


_WITHOUT_FORMULA: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: _grouped_product_flops,  # the experts of Transformers' mixtures
}


_READ_WHOLE = frozenset(
    {
        _aten.cat,
        _aten.clone,
        _aten.native_layer_norm,
        _aten.native_layer_norm_backward,
        _aten.mean,
        _aten.sum,
    }
)
"""Operations that read all elements of their arguments, beside those that torch marks as elementwise."""
_NOT_WRITTEN = frozenset({_aten.empty_like, _aten.new_empty, _aten.new_empty_strided})
"""Operations that leave the memory of their results as it is."""
_HIDDEN_WORKSPACE = (
    "zero-plan: the model has a torch.nn.LSTM. What it keeps for backward on the CPU is not in this plan, as torch's "
    "fake operation says that it is empty; a real step needs more."
)
SMALLEST_MOVED = 8 << 20
"""Bytes: what an operation on fewer moves may stay in a processor's caches, whose rate is not that of memory."""


class Operations:
    """Counts the floating-point operations of matrix products, convolutions and attention (causal attention counts
    half), and the bytes that other operations read and write while ``computing()`` is true.

    Attributes:
        flops_by_dtype: floating-point operations since the last `clear`, by the name of the dtype they compute in.
        attention_by_dtype: those among them of fused attention.
        moved_nbytes: bytes of memory since the last `clear` that other operations with results of their own have to
            read and write at least: of those that move `SMALLEST_MOVED` or more.
    """

    def __init__(self, computing: Callable[[], bool] = lambda: True) -> None:
        self._computing = computing
        self.flops_by_dtype: Counter[str] = Counter()
        self.attention_by_dtype: Counter[str] = Counter()
        self.moved_nbytes = 0

    def clear(self) -> None:
        """Set all counts to 0."""
        self.flops_by_dtype.clear()
        self.attention_by_dtype.clear()
        self.moved_nbytes = 0

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs of an operation that has run to the count of its first argument's dtype, or, if torch has no
        formula for them, the bytes that it moves. Warns of an LSTM, which keeps memory that no plan sees.

        ``func``, ``args``, ``kwargs``, ``result``: the operation, its arguments and its results.
        """
        formula, place = _formula_of(func)
        if getattr(func, "overloadpacket", None) is _aten.mkldnn_rnn_layer and not result[-1].numel():
            warnings.warn(_HIDDEN_WORKSPACE, stacklevel=2)
        if formula is None:
            if makes_memory(func) and self._computing():
                moved = _moved_nbytes(func, args, result)
                self.moved_nbytes += moved if moved >= SMALLEST_MOVED else 0
            return
        flops = formula(*args, **(kwargs or {}), out_val=result)
        causal = place >= 0 and len(args) > place and bool(args[place])
        flops, dtype = flops // 2 if causal else flops, str(args[0].dtype).removeprefix("torch.")
        self.flops_by_dtype[dtype] += flops
        if "scaled_dot_product" in func.__name__:
            self.attention_by_dtype[dtype] += flops


@functools.cache
def _formula_of(func: Any) -> tuple[Callable[..., int] | None, int]:
    """Return (formula, index of ``is_causal``) for the operation ``func``: the function that computes its FLOPs, None
    if there is none, and the index of the argument ``is_causal``, -1 if it has none.
    """
    packet = getattr(func, "overloadpacket", None)
    found, place = _ON_CPU.get(packet, (packet, -1))
    return flop_registry.get(found) or _WITHOUT_FORMULA.get(packet), place


@functools.cache
def makes_memory(func: Any) -> bool:
    """Return whether ``func`` is an operation of torch's own whose results have new memory and a known shape: they are
    neither views nor written arguments.
    """
    return (
        getattr(func, "namespace", "") == "aten"
        and not func.is_view
        and not func._schema.is_mutable
        and torch.Tag.dynamic_output_shape not in func.tags
    )


def _moved_nbytes(func: Any, args: Any, result: Any) -> int:
    """Return the least bytes that the operation ``func`` writes into its results and reads from its arguments.

    0 for an operation without tensors among its arguments: the system may provide its memory only when it is used.
    """
    given = list(tensors_in(args))
    if not given or func.overloadpacket in _NOT_WRITTEN:
        return 0
    memory = {tensor.untyped_storage()._cdata for tensor in given}
    made = tensors_in(result if isinstance(result, (tuple, list)) else (result,))
    moved = sum(_nbytes(tensor) for tensor in made if tensor.untyped_storage()._cdata not in memory)
    if not moved:
        return 0
    if func.overloadpacket in _READ_WHOLE or torch.Tag.pointwise in func.tags:
        moved += sum({id(tensor): _nbytes(tensor) for tensor in given}.values())
    return moved


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory that the elements of ``tensor`` take; an expanded dimension counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among ``values``, also inside lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
