"""A number that says whether ranks hold the same bits."""

from __future__ import annotations

import torch

_BLOCK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(x: torch.Tensor) -> int:
    """Return a 64-bit digest of a contiguous 1-D tensor's bits: equal for equal bits, else different by all odds.

    Every element's bits are multiplied by an odd number of their position; products wrap around and are added up on the
    tensor's device.
    """
    bits = x.view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        position = torch.arange(start, start + block.numel(), dtype=torch.int64, device=x.device)
        total += ((block + 1) * ((position * _MULTIPLIER) | 1)).sum()
    return int(total)
