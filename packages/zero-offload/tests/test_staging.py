"""The way of an accelerator (gradients copied to the host, weights copied back) gives what updating in place gives.

Here the CPU stands for the device: copies are real but happen at once. `test_gpu.py` is the same beside compute.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_offload import OffloadedOptimizer
from zero_offload.optimizer._couriers import StagingCourier, staging_bytes

NUMELS = (5_000, 1, 20_000, 8_192)


def run(dtype: torch.dtype, staged: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in NUMELS]
    with OffloadedOptimizer(params, lr=0.05, sub_group_size=4096) as optimizer:
        if staged:
            courier = StagingCourier(torch.device("cpu"), optimizer._slices)
            optimizer._courier = courier
            assert optimizer.memory()["staging"] == staging_bytes(optimizer._slices)
        for step in range(4):
            optimizer.zero_grad()
            for number, param in enumerate(params):
                if number != step:
                    param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            optimizer.clip_grad_norm_(0.7)
            optimizer.step()
    return torch.cat([p.detach() for p in params])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_staging_changes_no_bit(dtype: torch.dtype) -> None:
    assert torch.equal(run(dtype, staged=True), run(dtype, staged=False))


def test_staging_takes_two_slices_of_gradients_and_weights() -> None:
    with OffloadedOptimizer([nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in NUMELS]) as optimizer:
        # Every tensor begins at a multiple of 64 bytes.
        assert staging_bytes(optimizer._slices) == 2 * 2 * (10_048 + 64 + 40_000 + 16_384)
