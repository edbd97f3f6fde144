"""The native kernels give the bits of what they stand for in plain torch."""

from __future__ import annotations

import pytest
import torch

from zero_core.kernels import NativeGridSquares
from zero_partition import GRID, grid_squares


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_squares_of_blocks_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    for blocks in (0, 1, 3, 300, 1025):
        generator = torch.Generator().manual_seed(blocks)
        x = torch.randn(blocks * GRID, generator=generator, dtype=torch.float64).mul_(3).exp().to(dtype)
        x = torch.where(x.isfinite(), x, 1.0).to(dtype)
        assert torch.equal(NativeGridSquares()(x), grid_squares(x))
        assert grid_squares(x).sum().item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)
