"""The optimizers that a configuration names: torch's, the CPU kernels', and those that neither has."""

from __future__ import annotations

from .build import Parameters, build_optimizer

__all__ = ["Parameters", "build_optimizer"]
