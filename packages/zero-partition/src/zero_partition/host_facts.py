"""Facts about many parameters at once that the host knows: no device is asked, and no Python code runs for each one.

Call them inside `unit_edits.without_torch_function`: released parameters answer by Python code of their own else.
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
"""How many references a storage has, by its ``_cdata``."""


def any_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True when one of the tensors has a ``.grad``."""
    return any(map(operator.is_not, map(_GRAD, tensors), repeat(None)))


def gradients_are(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor | None]) -> bool:
    """Return True when each tensor's ``.grad`` is the expected object."""
    return not any(map(operator.is_not, map(_GRAD, tensors), expected))


def are_set_to(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return True when each tensor has the memory, the shape and the strides of the expected one."""
    return all(map(torch.Tensor.is_set_to, tensors, expected))


def dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Each tensor's dtype."""
    return list(map(_DTYPE, tensors))


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Each tensor's version counter; none of them is an inference tensor, which has none."""
    return list(map(_VERSION, tensors))


def untouched(
    tensors: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    known_dtypes: Sequence[torch.dtype],
    known_versions: Sequence[int],
) -> bool:
    """Return True when every tensor is the expected one, in the known dtype, and nothing was written through it.

    The dtypes and versions are lists, as `dtypes` and `versions` give them.
    """
    if not are_set_to(tensors, expected) or dtypes(tensors) != known_dtypes:
        return False
    return versions(tensors) == known_versions


def exchange_classes(tensors: Sequence[torch.Tensor], other: Callable[[type], type]) -> None:
    """Give each tensor the class that ``other`` says for its own. Released parameters may be among them anywhere."""
    kinds = set(map(type, tensors))
    for kind in kinds:
        exchanged = other(kind)
        if exchanged is not kind:
            chosen = tensors if len(kinds) == 1 else [tensor for tensor in tensors if type(tensor) is kind]
            deque(map(setattr, chosen, repeat("__class__"), repeat(exchanged)), maxlen=0)


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory of a contiguous tensor on the host; good as long as the tensor is."""
    nbytes = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()) if nbytes else (ctypes.c_ubyte * 0)()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True for torch's fake tensors, which have everything but memory."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # where nobody has imported it, there are none
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True when a tensor has no class of its own; torch's fake tensors stand for plain ones."""
    return type(tensor) is torch.Tensor or is_fake(tensor)


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is in; a fake one has a number in its place that no other live
    storage has. Raises what torch does for tensors without a storage of their own, as sparse ones."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    return storage._cdata if not address and is_fake(tensor) else address


def sharers(tensor: torch.Tensor) -> int:
    """Return how many tensors are in the memory of ``tensor``, itself included; a NumPy array over it counts as one."""
    return storage_references(tensor.untyped_storage()._cdata) - REFERENCES_OF_ONE + 1


def _references_of_one() -> int:
    tensor = torch.empty(1)
    return storage_references(tensor.untyped_storage()._cdata)


REFERENCES_OF_ONE = _references_of_one()
"""How many references a storage has that one tensor is in: torch's Python object for it may hold one of its own."""


def install(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Make each tensor its one of ``values``, as ``tensor.data = value`` does."""
    deque(map(_DATA.__set__, tensors, values), maxlen=0)
