"""The engine's checkpoints: its state as named intervals of logical tensors, and back, at any world size and stage."""

from __future__ import annotations

from .loading import CustomLoad, Wanted, load
from .saving import Saver

__all__ = ["CustomLoad", "Saver", "Wanted", "load"]
