"""The local sum of the one reduction: rank order, the accumulate dtype, one division."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_comm import sum_slices

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def in_order(slices: list[torch.Tensor], dtype: torch.dtype, divisor: int) -> torch.Tensor:
    total = slices[0].to(dtype).clone()
    for other in slices[1:]:
        total = total + other.to(dtype)
    return total / divisor if divisor != 1 else total


@given(
    numel=st.integers(0, 300),
    count=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    accumulate=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_sum_is_the_float64_sum_within_the_rounding_of_the_accumulate_dtype(
    numel: int, count: int, dtype: torch.dtype, seed: int, accumulate: bool, data: st.DataObject
) -> None:
    out_dtype = data.draw(
        st.sampled_from([d for d in DTYPES if d.itemsize >= dtype.itemsize and (d.itemsize > 2 or d == dtype)])
    )
    generator = torch.Generator().manual_seed(seed)
    slices = [(torch.randn(numel, generator=generator, dtype=torch.float64) * 3).to(dtype) for _ in range(count)]
    before = torch.randn(numel, generator=generator, dtype=torch.float64).to(out_dtype)
    out = before.clone()
    sum_slices(slices, out, divisor=count, accumulate=accumulate)
    exact = torch.stack([s.double() for s in slices]).sum(0) / count + (before.double() if accumulate else 0)
    magnitude = torch.stack([s.double().abs() for s in slices]).sum(0) + before.double().abs() + 1
    bound = (count + 2) * torch.finfo(out_dtype).eps * magnitude
    assert bool(((out.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_is_that_of_the_ranks_and_the_division_comes_once_at_the_end(
    dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(7)
    slices = [torch.randn(70_001, generator=generator).to(dtype) for _ in range(5)]  # more than two blocks
    out = torch.empty(70_001, dtype=out_dtype)
    sum_slices(slices, out, divisor=5)
    assert torch.equal(out, in_order(slices, out_dtype, 5))


def test_accumulating_adds_the_finished_average() -> None:
    slices = [torch.randn(100) for _ in range(3)]
    before = torch.randn(100)
    out = before.clone()
    sum_slices(slices, out, divisor=3, accumulate=True)
    assert torch.equal(out, before + in_order(slices, torch.float32, 3))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_result_may_be_written_over_any_of_the_slices(position: int) -> None:
    slices = [torch.randn(40_000) for _ in range(3)]
    expected = in_order(slices, torch.float32, 3)
    sum_slices(slices, slices[position], divisor=3)
    assert torch.equal(slices[position], expected)


def test_not_a_number_and_infinity_come_through() -> None:
    slices = [torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.0, 1.0, 1.0])]
    out = torch.empty(3)
    sum_slices(slices, out, divisor=2)
    assert out[0] == 1.0 and out[1].isnan() and out[2] == torch.inf
