"""Facts about many parameters at once, read on the host: no device is synchronised, no Python code runs for each one.

Call these functions inside `unit_edits.without_torch_function`; else released parameters run Python code of their own.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

_DTYPE = operator.attrgetter("dtype")
_GRAD = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")
_DATA: Any = torch.Tensor.data
storage_references: Callable[[int], int] = torch._C._storage_Use_Count
"""Return the number of references to a storage, given its ``_cdata``."""


def any_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any of ``tensors`` has a ``.grad``."""
    return any(map(operator.is_not, map(_GRAD, tensors), repeat(None)))


def gradients_are(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]) -> bool:
    """Return whether the ``.grad`` of each of ``tensors`` is the very object at its position in ``expected``, which may
    be None."""
    return not any(map(operator.is_not, map(_GRAD, tensors), expected))


def are_set_to(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return whether each of ``tensors`` has the memory, the shape and the strides of the one at its position in
    ``expected``."""
    return all(map(torch.Tensor.is_set_to, tensors, expected))


def dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Return each tensor's dtype."""
    return list(map(_DTYPE, tensors))


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return each tensor's version counter, which grows with every in-place write. Raises RuntimeError for inference
    tensors, which have none."""
    return list(map(_VERSION, tensors))


def untouched(
    tensors: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    known_dtypes: Sequence[torch.dtype],
    known_versions: Sequence[int],
) -> bool:
    """Return whether no tensor was replaced, cast or written: each has the memory, shape and strides of the one at its
    position in ``expected``, and its dtype and version counter are as known.

    ``known_dtypes`` and ``known_versions``: lists from earlier calls of `dtypes` and `versions`. Raises RuntimeError
    for inference tensors.
    """
    if not are_set_to(tensors, expected) or dtypes(tensors) != known_dtypes:
        return False
    return versions(tensors) == known_versions


def exchange_classes(tensors: Sequence[torch.Tensor], other: Callable[[type], type]) -> None:
    """Set each tensor's class to the one that ``other`` returns for its present class, in place; tensors may have
    different classes."""
    kinds = set(map(type, tensors))
    for kind in kinds:
        exchanged = other(kind)
        if exchanged is not kind:
            chosen = tensors if len(kinds) == 1 else [tensor for tensor in tensors if type(tensor) is kind]
            deque(map(setattr, chosen, repeat("__class__"), repeat(exchanged)), maxlen=0)


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a contiguous CPU tensor as an array of bytes, without a copy; valid only while the tensor
    lives."""
    nbytes = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()) if nbytes else (ctypes.c_ubyte * 0)()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is one of torch's fake tensors, which have everything but memory."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # where nobody has imported it, there are none
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is of class `torch.Tensor` itself, no subclass; torch's fake tensors count as such."""
    return type(tensor) is torch.Tensor or is_fake(tensor)


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of ``tensor``; for a fake tensor, a number that no other live storage has.

    0 for an empty storage. Raises what torch raises for tensors without a storage, such as sparse ones.
    """
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    return storage._cdata if not address and is_fake(tensor) else address


def sharers(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of ``tensor``, itself included; a NumPy array over it counts as one."""
    return storage_references(tensor.untyped_storage()._cdata) - REFERENCES_OF_ONE + 1


def _references_of_one() -> int:
    """Return the number of references to the storage of a new tensor."""
    tensor = torch.empty(1)
    return storage_references(tensor.untyped_storage()._cdata)


REFERENCES_OF_ONE = _references_of_one()
"""The number of references to a storage that one tensor uses: torch's Python object for it may hold one of its own."""


def object_references(tensor: torch.Tensor) -> int:
    """Return the number of references to torch's Python object for the storage of ``tensor``."""
    return sys.getrefcount(tensor.untyped_storage())


OBJECT_REFERENCES_OF_ONE = object_references(torch.empty(1))
"""What `object_references` returns for a storage whose Python object no code holds."""


def install(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Give each of ``tensors`` the memory of the one at its position in ``values``, as ``tensor.data = value`` does."""
    deque(map(_DATA.__set__, tensors, values), maxlen=0)
