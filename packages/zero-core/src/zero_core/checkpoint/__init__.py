"""Save an engine's state as named intervals of full tensors, and load it at any world size and stage.

Read `checkpoints.py` first, then `saving.py` and `loading.py`."""

from __future__ import annotations

from .checkpoints import Checkpoints
from .departure import Departure
from .in_memory import InMemory
from .loading import CustomLoad, Wanted
from .periodic import periodic_of
from .resuming import Resumed
from .saving import Dialect, OwnDialect, Saver

__all__ = [
    "Checkpoints",
    "CustomLoad",
    "Departure",
    "Dialect",
    "InMemory",
    "OwnDialect",
    "Resumed",
    "Saver",
    "Wanted",
    "periodic_of",
]
