"""Torch functions by name: which attribute they use, and whether that needs a tensor's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from zero_partition.torch_calls import attribute_of, needs_values, reads_values

EXPORT: Any = torch.Tensor.__cuda_array_interface__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "attribute"),
    [
        (torch.Tensor.grad.__get__, "grad"),
        (torch.Tensor.data.__set__, "data"),
        (torch.Tensor.grad.__delete__, "grad"),
        (EXPORT.__get__, "__cuda_array_interface__"),
        (torch.Tensor.add, ""),
    ],
)
def test_the_attribute_is_named_whether_torch_defines_it_in_c_or_in_python(function: Any, attribute: str) -> None:
    assert attribute_of(function) == attribute


def test_memory_that_is_handed_to_another_library_needs_the_values_where_there_is_any() -> None:
    with FakeTensorMode():
        on_cuda, on_cpu = torch.empty(3, device="cuda"), torch.empty(3)
    assert reads_values("__cuda_array_interface__", on_cuda)
    assert needs_values("__get__", attribute_of(EXPORT.__get__), (on_cuda,))
    assert not reads_values("__cuda_array_interface__", on_cpu)  # torch raises AttributeError
    assert not reads_values("shape", on_cuda)
