"""The effect on its arguments of each torch function that ``__torch_function__`` sees, by its name."""

from __future__ import annotations

from typing import Any

VIEWS = frozenset(["H", "T", "imag", "mH", "mT", "real"])  # attributes that need the values
FACTS = frozenset(
    """__dir__ __format__ __hash__ __len__ __reduce_ex__ __repr__ __setstate__ __str__ _has_compatible_shallow_copy_type
    backward can_cast data_ptr dim element_size empty_like full_like get_device is_complex is_contiguous
    is_floating_point is_inference is_pinned is_same_size is_set_to is_shared is_signed isfinite isinf isnan ndimension
    nelement new_empty new_empty_strided new_full new_ones new_tensor new_zeros numel ones_like rand_like randint_like
    randn_like register_hook register_post_accumulate_grad_hook requires_grad_ result_type retain_grad size storage
    storage_offset storage_type stride untyped_storage zeros_like""".split()
)
_ITEM_WRITES = frozenset("__iadd__ __iand__ __idiv__ __imul__ __ior__ __isub__ __itruediv__ __setitem__".split())


def name_of(func: Any) -> str:
    """The function's own name; ``__get__``, ``__set__`` and ``__delete__`` for what an attribute does."""
    return getattr(func, "__name__", str(func))


def attribute_of(func: Any) -> str:
    """The attribute that ``func`` reads or sets, "" where it is none."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def writes(name: str) -> bool:
    """Return whether the function called ``name`` writes its first argument."""
    return name in _ITEM_WRITES or (name.endswith("_") and not name.endswith("__"))
