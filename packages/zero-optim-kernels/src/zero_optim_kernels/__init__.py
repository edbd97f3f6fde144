"""Optimizer arithmetic over raw pointers, dispatched at run time to the best instruction set."""

from __future__ import annotations

from ._calls import dry_run_kernels
from .blocks import dequantize_blocks, quantize_blocks
from .buffers import cast, count_nonfinite, digests, l2_norm, l2_norm_squared, l2_norms_squared, scale, sum_slices
from .isa import active_isa, available_isas, default_threads, unavailable_isas
from .steps import adagrad_step, adam_step, lamb_apply, lamb_step, lion_step, sgd_step

__all__ = [
    "active_isa",
    "adagrad_step",
    "adam_step",
    "available_isas",
    "cast",
    "count_nonfinite",
    "default_threads",
    "dequantize_blocks",
    "digests",
    "dry_run_kernels",
    "l2_norm",
    "l2_norm_squared",
    "l2_norms_squared",
    "lamb_apply",
    "lamb_step",
    "lion_step",
    "quantize_blocks",
    "scale",
    "sgd_step",
    "sum_slices",
    "unavailable_isas",
]
