"""Optimizers that send one bit per element instead of gradients; read `base.py` first, then `adam.py`."""

from __future__ import annotations

from .adam import OneBitAdam, OneBitOptimizer
from .lamb import OneBitLamb
from .zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitOptimizer", "ZeroOneAdam"]
