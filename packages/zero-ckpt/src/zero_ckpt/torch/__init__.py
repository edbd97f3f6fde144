"""Adapters for PyTorch: tensors as buffers, ranks of torch.distributed, modules and optimizers."""

from __future__ import annotations

from .buffers import Stager, dtype_name, tensor_buffer, torch_dtype
from .coordinator import DistCoordinator, default_coordinator
from .loading import load
from .node_folder import node_memory_folder
from .node_memory import Found, NodeMemory
from .rng import RngState
from .saving import Stateful, save

__all__ = [
    "DistCoordinator",
    "Found",
    "NodeMemory",
    "RngState",
    "Stager",
    "Stateful",
    "default_coordinator",
    "dtype_name",
    "load",
    "node_memory_folder",
    "save",
    "tensor_buffer",
    "torch_dtype",
]
