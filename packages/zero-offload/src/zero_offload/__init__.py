"""Keep named shards on the cheapest tier that can return them in time."""

from __future__ import annotations

from .activations import offload_activations
from .budget import HostBudget
from .errors import BudgetError, MissingExtraError, OffloadError, ShardCorruptError, ShardError, StoreFullError
from .host import HostStore
from .nvme import NvmeStore
from .optimizer import OffloadedOptimizer

__all__ = [
    "BudgetError",
    "HostBudget",
    "HostStore",
    "MissingExtraError",
    "NvmeStore",
    "OffloadError",
    "OffloadedOptimizer",
    "ShardCorruptError",
    "ShardError",
    "StoreFullError",
    "offload_activations",
]
