"""The squared norm of a shard, in float64 and in one fixed order."""

from __future__ import annotations

from typing import Protocol

import torch

_BLOCK = 1 << 16


class NormSquared(Protocol):
    """Sum of squares of a 1-D floating tensor, accumulated in float64; NaN and inf propagate."""

    def __call__(self, x: torch.Tensor) -> float: ...


def norm_squared(x: torch.Tensor) -> float:
    """Plain torch `NormSquared`: blocks of 65,536 elements in float64, summed in order."""
    if x.device.type != "cpu":
        return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
    total = 0.0
    for start in range(0, x.numel(), _BLOCK):
        block = x[start : start + _BLOCK].double()
        total += float(torch.dot(block, block))
    return total
