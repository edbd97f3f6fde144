"""The squared norm of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_optim_kernels import l2_norm_squared

from .update.plans import KERNEL_DTYPES

__all__ = ["norm_squared"]


def norm_squared(gradients: Sequence[torch.Tensor]) -> float:
    """The sum of squares of flat gradients, in float64; NaN and infinity stay what they are."""
    here = [grad for grad in gradients if grad.device.type == "cpu"]
    away = [grad for grad in gradients if grad.device.type != "cpu"]
    squared = 0.0
    if away:
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in away])
        squared = float(norms.double().square().sum())
    for dtype, name in KERNEL_DTYPES.items():
        own = [grad for grad in here if grad.dtype == dtype]
        if own:
            squared += l2_norm_squared([g.data_ptr() for g in own], [g.numel() for g in own], dtype=name)  # type: ignore[arg-type]
    return squared
