"""Classify the torch functions that ``__torch_function__`` gets by name: what they need, and what they write."""

from __future__ import annotations

from typing import Any

import torch

_VIEWS = frozenset(["H", "T", "imag", "mH", "mT", "real"])  # attributes that need the values
_CUDA_ARRAY = "__cuda_array_interface__"  # the same on CUDA; elsewhere torch raises AttributeError
FACTS = frozenset(
    """__dir__ __format__ __hash__ __len__ __reduce_ex__ __repr__ __setstate__ __str__ _has_compatible_shallow_copy_type
    backward can_cast data_ptr dim element_size empty_like full_like get_device is_complex is_contiguous
    is_floating_point is_inference is_pinned is_same_size is_set_to is_shared is_signed isfinite isinf isnan ndimension
    nelement new_empty new_empty_strided new_full new_ones new_tensor new_zeros numel ones_like rand_like randint_like
    randn_like register_hook register_post_accumulate_grad_hook requires_grad_ result_type retain_grad size storage
    storage_offset storage_type stride untyped_storage zeros_like""".split()
)
SHAPES = frozenset(["__len__", "dim", "ndim", "ndimension", "nelement", "numel", "shape", "size"])
_ELEMENTWISE = frozenset(
    """abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh
    atan atan2 atanh bfloat16 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool
    byte ceil celu char clamp clamp_max clamp_min clip clone conj contiguous copy copysign cos cosh cpu cuda deg2rad
    detach digamma div divide double elu empty_like eq erf erfc erfinv exp exp2 expit expm1 fill fix float float_power
    floor floor_divide fmax fmin fmod frac full_like ge gelu greater greater_equal gt half hardsigmoid hardswish
    hardtanh heaviside hypot int isclose isfinite isinf isnan isneginf isposinf isreal ldexp le leaky_relu lerp less
    less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    logsigmoid long lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative nextafter not_equal
    ones_like positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn short sigmoid sign signbit
    silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold to
    true_divide trunc type where xlogy zero zeros_like""".split()
)
_OPERATORS = frozenset(
    "abs add and eq floordiv ge gt invert le lshift lt mod mul ne neg or pos pow rshift sub truediv xor".split()
)
_ITEM_WRITES = frozenset("__iadd__ __iand__ __idiv__ __imul__ __ior__ __isub__ __itruediv__ __setitem__".split())


def name_of(func: Any) -> str:
    """Return the name of torch function ``func``; ``__get__``, ``__set__`` or ``__delete__`` if it uses a tensor
    attribute."""
    return getattr(func, "__name__", str(func))


def attribute_of(func: Any) -> str:
    """Return the name of the tensor attribute that torch function ``func`` reads, sets or deletes; "" if it does none
    of these."""
    if name_of(func) not in ("__get__", "__set__", "__delete__"):
        return ""
    described = func.__self__
    return getattr(described.fget if isinstance(described, property) else described, "__name__", "")


def writes(name: str) -> bool:
    """Return whether the torch function called ``name`` writes its first argument, as its name says (``add_``,
    ``__iadd__``)."""
    return name in _ITEM_WRITES or (name.endswith("_") and not name.endswith("__"))


def is_elementwise(name: str) -> bool:
    """Return whether the torch function called ``name`` computes each element from the elements at the same position
    only.

    Such a function does the same to a part of a tensor as to all of it. False for a function that this file does not
    list.
    """
    if name.startswith("__"):
        operator = name.strip("_")
        return operator in _OPERATORS or (operator[:1] in ("r", "i") and operator[1:] in _OPERATORS)
    return name.removeprefix("_foreach_").removesuffix("_") in _ELEMENTWISE


def reads_values(attribute: str, tensor: torch.Tensor) -> bool:
    """Return whether reading the attribute called ``attribute`` needs the values of ``tensor``, not only facts such as
    its shape."""
    with torch._C.DisableTorchFunctionSubclass():
        return attribute in _VIEWS or (attribute == _CUDA_ARRAY and tensor.is_cuda)


def needs_values(call: str, attribute: str, args: tuple[Any, ...]) -> bool:
    """Return whether the torch function called ``call`` needs a tensor's values, not only facts such as its shape.

    ``attribute``: what `attribute_of` returns for the function. ``args``: its arguments. False for ``detach``, which
    only passes the values on.
    """
    if call == "__get__":
        return reads_values(attribute, args[0])
    return call != "detach" and call not in FACTS and call not in SHAPES
