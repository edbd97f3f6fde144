"""Shortcuts through torch's fake tensors. They give the same results as the fake mode, without its general cache, whose
keys and entries cost several times as much as the shapes themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from .operations import makes_memory, tensors_in

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split_with_sizes.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unbind.int,
        _aten.unsqueeze.default,
        _aten.view.default,
        _aten.view.dtype,
    }
)
"""Views of their first argument; the others are no tensors."""
_WRITES = frozenset({_aten.fill_.Scalar, _aten.normal_.default, _aten.uniform_.default, _aten.zero_.default})
"""Operations that write their first argument, change no shape, and take no other tensor."""


class Shape(NamedTuple):
    """A result that has memory of its own: sizes and strides in elements, dtype and device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Results(NamedTuple):
    """The results of an operation. ``kind``: tuple or list; None for a single result. ``parts``: the shape of each
    result, None for a result that is None.
    """

    kind: type | None
    parts: tuple[Shape | None, ...]


class Shortcuts:
    """Finds the results of operations of ``mode`` without torch's general cache.

    The shapes of results with memory of their own depend only on the shapes, strides, dtypes and devices of the tensors
    among the arguments and on the other arguments, if no argument has a value. These make the key of an operation, by
    which its result's shapes are looked up. A plain tensor is a strided tensor of the mode, without a value.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, Results] = {}

    def run_view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of ``func`` if it is a view, or its first argument if ``func`` writes that; None for any
        other operation, and if the first argument is no plain tensor.
        """
        is_view = func in _VIEWS
        if not (is_view or func in _WRITES) or not self._is_plain(args[0]):
            return None
        if not is_view:
            return args[0]
        with in_kernel_invocation_manager(self._mode):
            found = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(found, torch.Tensor):
            return FakeTensor(self._mode, found, device)
        return type(found)(FakeTensor(self._mode, one, device) for one in found)

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a hashable key of the operation ``func`` with these arguments, for `run_known` and `learn`; None for
        an operation whose results may be views or depend on more than shapes.
        """
        if not makes_memory(func):
            return None
        found = self._describe_arguments(args)
        named = None if found is None else self._describe_arguments(kwargs.values())
        return None if named is None else (func, found, *kwargs, named, torch.get_default_dtype())

    def run_known(self, key: Any) -> Any:
        """Return new results of the operation with the key ``key``; None if `learn` has not seen it."""
        known = self._known.get(key)
        if known is None:
            return None
        made = (None if part is None else self._make_tensor(part) for part in known.parts)
        return next(made) if known.kind is None else known.kind(made)

    def learn(self, key: Any, args: Any, result: Any) -> None:
        """Remember the shapes of ``result``, which the mode gave for the operation with the key ``key`` and the
        arguments ``args``, if all results are tensors with memory of their own.
        """
        kind = type(result) if isinstance(result, (tuple, list)) else None
        parts = (result,) if kind is None else tuple(result)
        made = [part for part in parts if part is not None]
        if kind not in (None, tuple, list) or not made or not all(map(self._is_rebuildable, made)):
            return
        memory = [tensor.untyped_storage()._cdata for tensor in (*made, *tensors_in(args))]
        if all(memory.count(one) == 1 for one in memory[: len(made)]):
            self._known[key] = Results(kind, tuple(None if part is None else _shape_of(part) for part in parts))

    def _describe_arguments(self, values: Iterable[Any]) -> tuple[Any, ...] | None:
        """Return a hashable description of arguments with all that the shapes of an operation's results depend on; None
        if an argument has a value, or is a tensor that is not plain.
        """
        found: list[Any] = []
        for value in values:
            if isinstance(value, FakeTensor):
                if not self._is_plain(value):
                    return None
                found.append((value.shape, value.stride(), value.dtype, value.fake_device))
            elif isinstance(value, (list, tuple)):
                inside = self._describe_arguments(value)
                if inside is None:
                    return None
                found.append(inside)
            elif isinstance(value, (torch.Tensor, dict)):
                return None
            else:
                found.append((type(value), value))  # 1, 1.0 and True are equal, and give other dtypes
        return tuple(found)

    def _is_plain(self, value: Any) -> bool:
        """Return whether ``value`` is a plain tensor: a strided one of the mode, without a value."""
        return (
            isinstance(value, FakeTensor)
            and value.fake_mode is self._mode
            and value.constant is None
            and value.layout is torch.strided
        )

    def _is_rebuildable(self, value: Any) -> bool:
        """Return whether `_make_tensor` can rebuild ``value`` from its `Shape`.

        That takes a plain tensor (`_is_plain`) without a conjugate or negative bit, at offset 0 of a storage that has
        just as many bytes as a new tensor of its sizes and strides. False for any other object. Sharing with other
        tensors is not checked; `learn` does that.
        """
        if not self._is_plain(value) or value.storage_offset() or value.is_conj() or value.is_neg():
            return False
        made, own = self._make_tensor(_shape_of(value)).untyped_storage(), value.untyped_storage()
        return bool(made.nbytes() == own.nbytes())

    def _make_tensor(self, shape: Shape) -> FakeTensor:
        """Return a new fake tensor of the mode with the sizes, strides, dtype and device of ``shape``."""
        with in_kernel_invocation_manager(self._mode):
            made = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device="meta")
        return FakeTensor(self._mode, made, shape.device)


def _shape_of(tensor: FakeTensor) -> Shape:
    """Return the sizes, strides, dtype and device from which `Shortcuts` makes a tensor like ``tensor``."""
    return Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)
