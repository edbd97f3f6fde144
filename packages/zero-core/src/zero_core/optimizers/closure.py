"""The closure that torch lets a training loop hand to `step`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What ``closure`` returns, run with gradients on; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
