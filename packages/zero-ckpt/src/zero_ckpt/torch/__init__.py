"""Adapters for PyTorch: tensors as buffers, ranks of torch.distributed, modules and optimizers."""

from __future__ import annotations

from .buffers import Stager, dtype_name, tensor_buffer, torch_dtype
from .coordinator import DistCoordinator, default_coordinator

__all__ = [
    "DistCoordinator",
    "Stager",
    "default_coordinator",
    "dtype_name",
    "tensor_buffer",
    "torch_dtype",
]
