"""Keep named shards on the cheapest tier that can return them in time."""

from __future__ import annotations

from . import malloc
from .abandoned import remove_stores
from .activations import offload_activations
from .budget import HostBudget
from .errors import BudgetError, MissingExtraError, OffloadError, ShardCorruptError, ShardError, StoreFullError
from .host import HostStore
from .nvme import NvmeStore
from .optimizer import OffloadedOptimizer
from .parking import park, unpark
from .sealed import Sealed
from .trace import Trace
from .update import DelayedUpdate, ExactUpdate, FragmentPlan, OffloadedUpdate, ShardPlan, TierOptions

__all__ = [
    "BudgetError",
    "DelayedUpdate",
    "ExactUpdate",
    "FragmentPlan",
    "HostBudget",
    "HostStore",
    "MissingExtraError",
    "NvmeStore",
    "OffloadError",
    "OffloadedOptimizer",
    "OffloadedUpdate",
    "Sealed",
    "ShardCorruptError",
    "ShardError",
    "ShardPlan",
    "StoreFullError",
    "TierOptions",
    "Trace",
    "malloc",
    "offload_activations",
    "park",
    "remove_stores",
    "unpark",
]
