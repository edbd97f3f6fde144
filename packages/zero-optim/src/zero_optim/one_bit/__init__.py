"""Optimizers that send one bit per element instead of gradients; read `adam.py` first."""

from __future__ import annotations

from .adam import OneBitAdam, OneBitOptimizer
from .lamb import OneBitLamb
from .zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitOptimizer", "ZeroOneAdam"]
