"""The sum of slices on an accelerator has the bits of the sum in host memory."""

from __future__ import annotations

import pytest
import torch

from zero_comm import sum_slices, sum_slices_on_device

CASES = [(2, 1), (3, 1000), (8, 4097), (8, 1 << 20)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "numel"), CASES)
@pytest.mark.parametrize("spaced", ["evenly", "apart", "padded"])
def test_sum_has_the_bits_of_plain_torch(device: str, dtype: torch.dtype, count: int, numel: int, spaced: str) -> None:
    generator = torch.Generator().manual_seed(numel)
    whole = torch.randn(count, numel + 24 * (spaced == "padded"), generator=generator, dtype=torch.float64).to(dtype)
    sum_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    slices = [row[:numel] for row in whole]
    there = [row[:numel] for row in whole.to(device)]
    if spaced == "apart":
        there = [row.clone() for row in there]
    for divisor in (1, count):
        for accumulate in (False, True):
            expected, out = torch.ones(numel, dtype=sum_dtype), torch.ones(numel, dtype=sum_dtype, device=device)
            sum_slices(slices, expected, divisor=divisor, accumulate=accumulate)
            sum_slices_on_device(there, out, divisor=divisor, accumulate=accumulate)
            assert torch.equal(out.cpu(), expected), (divisor, accumulate)


@pytest.mark.gpu
def test_sum_may_be_one_of_the_slices() -> None:
    whole = torch.randn(4, 5000, device="cuda")
    expected = torch.empty(5000)
    sum_slices(list(whole.cpu()), expected, divisor=4)
    sum_slices_on_device(list(whole), whole[2], divisor=4)
    assert torch.equal(whole[2].cpu(), expected)
