"""Replacements for functions that older versions of torch lack; each names the version."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version of torch, from torch 2.8 on; its pre-releases count as the release."""


def memory_allocated(device: torch.device) -> int:
    """Return the bytes of live tensors on ``device``, which `torch.accelerator` says from torch 2.9 on."""
    if TORCH < (2, 9):
        return int(torch.get_device_module(device).memory_allocated(device))
    return int(torch.accelerator.memory_allocated(device))


def max_memory_allocated(device: torch.device) -> int:
    """Return the peak of `memory_allocated` so far, in bytes, which `torch.accelerator` says from torch 2.9 on."""
    if TORCH < (2, 9):
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return int(torch.accelerator.max_memory_allocated(device))
