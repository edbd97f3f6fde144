"""The squared norm: float64, one order, not a number comes through."""

from __future__ import annotations

import math

import pytest
import torch

from zero_partition import norm_squared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 65_536, 200_001])
def test_it_is_the_float64_sum_of_squares(dtype: torch.dtype, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert norm_squared(x) == pytest.approx(math.fsum((x.double() ** 2).tolist()), rel=1e-13)


def test_squares_beyond_float32_and_float16_do_not_overflow() -> None:
    assert norm_squared(torch.full((4,), 6e4, dtype=torch.float16)) == pytest.approx(
        4 * float(torch.tensor(6e4, dtype=torch.float16)) ** 2
    )
    assert norm_squared(torch.full((4,), 1e30)) == pytest.approx(4e60, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_not_finite(bad: float) -> None:
    x = torch.zeros(70_000)
    x[69_000] = bad
    assert not math.isfinite(norm_squared(x))
