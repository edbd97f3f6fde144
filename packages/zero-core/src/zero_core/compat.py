"""Things that versions of torch lack, one function each, which names the version."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch, from torch 2.8 on; its pre-releases count as the release."""


def memory_allocated(device: torch.device) -> int:
    """Return the bytes of tensors on a device. `torch.accelerator` tells since torch 2.9, the own module before."""
    if TORCH < (2, 9):
        return int(torch.get_device_module(device).memory_allocated(device))
    return int(torch.accelerator.memory_allocated(device))


def max_memory_allocated(device: torch.device) -> int:
    """Return the most bytes so far. `torch.accelerator` tells since torch 2.9, the own module before."""
    if TORCH < (2, 9):
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return int(torch.accelerator.max_memory_allocated(device))
