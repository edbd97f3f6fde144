"""Learning rate schedules: warm-up with constant or decaying rates, one cycle, and the range test for its bounds.

Read `base.py` first, then `warmup.py`.
"""

from __future__ import annotations

from .base import NotSteppedError, Scheduler
from .cyclic import LRRangeTest, OneCycle
from .warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LRRangeTest",
    "NotSteppedError",
    "OneCycle",
    "Scheduler",
    "VALID_LR_SCHEDULES",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
"""Names of the schedules of this package, as DeepSpeed orders them."""
