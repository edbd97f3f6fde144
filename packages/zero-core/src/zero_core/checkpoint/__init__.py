"""Save an engine's state as named intervals of full tensors, and load it at any world size and stage.

Read `checkpoints.py` first, then `saving.py` and `loading.py`."""

from __future__ import annotations

from .checkpoints import Checkpoints
from .in_memory import InMemory
from .launcher_orders import LauncherOrders
from .loading import CustomLoad, LoadChoice
from .periodic import periodic_of
from .resuming import Resumed
from .saving import Dialect, OwnDialect, Saver

__all__ = [
    "Checkpoints",
    "CustomLoad",
    "LauncherOrders",
    "Dialect",
    "InMemory",
    "OwnDialect",
    "Resumed",
    "Saver",
    "LoadChoice",
    "periodic_of",
]
