"""Optimizer arithmetic over raw pointers, dispatched at run time to the best instruction set."""

from __future__ import annotations

from .buffers import cast, count_nonfinite, l2_norm, l2_norm_squared, scale, sum_slices
from .isa import active_isa, available_isas, default_threads, unavailable_isas
from .steps import adam_step

__all__ = [
    "active_isa",
    "adam_step",
    "available_isas",
    "cast",
    "count_nonfinite",
    "default_threads",
    "l2_norm",
    "l2_norm_squared",
    "scale",
    "sum_slices",
    "unavailable_isas",
]
