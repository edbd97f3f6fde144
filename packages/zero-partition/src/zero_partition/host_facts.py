"""Facts about many parameters at once that the host knows: no device is asked, and no Python code runs for each one.

Call them inside `unit_edits.plainly`: released parameters answer by Python code of their own else.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat

import torch

_DTYPE = operator.attrgetter("dtype")
_GRAD = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")


def any_gradient(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True when one of the tensors has a ``.grad``."""
    return any(map(operator.is_not, map(_GRAD, tensors), repeat(None)))


def are_set_to(tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Return True when each tensor has the memory, the shape and the strides of the expected one."""
    return all(map(torch.Tensor.is_set_to, tensors, expected))


def dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Each tensor's dtype."""
    return list(map(_DTYPE, tensors))


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Each tensor's version counter; none of them is an inference tensor, which has none."""
    return list(map(_VERSION, tensors))
