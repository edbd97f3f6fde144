"""The optimizers that a configuration names: torch's, the CPU kernels', and those that neither has."""

from __future__ import annotations

from .build import Parameters, build_optimizer
from .one_bit import OneBitOptimizer

__all__ = ["OneBitOptimizer", "Parameters", "build_optimizer"]
