"""The engine's checkpoints: its state as named intervals of logical tensors, and back, at any world size and stage."""

from __future__ import annotations

from .in_memory import InMemory
from .loading import CustomLoad, Wanted, load
from .notices import Notices
from .periodic import Periodic, periodic_of
from .resuming import Resumed, resume
from .saving import Saver

__all__ = [
    "CustomLoad",
    "InMemory",
    "Notices",
    "Periodic",
    "Resumed",
    "Saver",
    "Wanted",
    "load",
    "periodic_of",
    "resume",
]
