"""What a released parameter looks like, and how writing one is found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_partition import ReleasedParameterError
from zero_partition.placeholder import Placeholders


def released(dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, nn.Parameter, Placeholders]:
    first, second = nn.Parameter(torch.zeros(3, 4, dtype=dtype)), nn.Parameter(torch.zeros(5, dtype=dtype))
    placeholders = Placeholders([("block.first", first), ("block.second", second)], dtype, torch.device("cpu"))
    placeholders.install()
    return first, second, placeholders


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shape_and_dtype_are_true_reading_gives_nan_and_memory_is_one_element(dtype: torch.dtype) -> None:
    first, second, placeholders = released(dtype)
    assert first.shape == (3, 4) and first.numel() == 12 and len(first) == 3 and second.dtype == dtype
    with torch._C.DisableTorchFunctionSubclass():
        read = first.detach()
    assert bool(first.isnan().all()) and bool((read.double() @ torch.ones(4, dtype=torch.float64)).isnan().all())
    assert [row.shape for row in read] == [(4,)] * 3
    assert sum(t.numel() for t in placeholders.tensors()) == 2
    placeholders.verify()


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.add_(1),
        lambda p: p.copy_(torch.ones(3, 4)),
        lambda p: p.normal_(),
        lambda p: p.fill_(1.0),
        lambda p: p.zero_(),
        lambda p: torch.abs(p, out=p),
        lambda p: nn.init.xavier_uniform_(p),
    ],
)
def test_writes_raise_where_they_happen(write: object) -> None:
    first, _, placeholders = released()
    with torch.no_grad(), pytest.raises(RuntimeError):
        write(first)  # type: ignore[operator]
    placeholders.verify()


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda p: p.data.fill_(1.0), "'block.first' was written while it was released"),
        (lambda p: p.detach().zero_(), "'block.first' was written while it was released"),
        (
            lambda p: setattr(p, "data", torch.ones(3, 4)),
            "'block.first' was replaced while it was released.*shape \\(3, 4\\)",
        ),
        (lambda p: setattr(p, "data", p.data.double()), "'block.first' was replaced while it was released"),
        (lambda p: setattr(p, "data", torch.full((3, 4), torch.nan)), "'block.first' was replaced"),
        (lambda p: setattr(p, "data", p.data.expand(2, 3, 4)), "'block.first' was replaced"),
        (lambda p: setattr(p, "data", p.data[:2]), "'block.first' was replaced"),
    ],
)
def test_writes_that_torch_lets_through_are_found_by_name_before_the_next_gather(write: object, text: str) -> None:
    first, _, placeholders = released()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        write(first)  # type: ignore[operator]
    with pytest.raises(ReleasedParameterError, match=text):
        placeholders.verify()


def test_installing_again_makes_a_parameter_a_placeholder_again() -> None:
    first, _, placeholders = released()
    first.data = torch.ones(3, 4)
    placeholders.install()
    placeholders.verify()
    assert bool(first.isnan().all())
