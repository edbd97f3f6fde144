"""Learning rate schedules: the five of a DeepSpeed file, and any of torch.optim.lr_scheduler by name.

Read `protocol.py` first, then `warmup.py`.
"""

from __future__ import annotations

from zero_core.schedules.base import NotSteppedError, Scheduler
from zero_core.schedules.build import VALID_LR_SCHEDULES, build_scheduler
from zero_core.schedules.cyclic import LRRangeTest, OneCycle
from zero_core.schedules.state import load_plain_state, plain_state
from zero_core.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LRRangeTest",
    "NotSteppedError",
    "OneCycle",
    "Scheduler",
    "VALID_LR_SCHEDULES",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
    "load_plain_state",
    "plain_state",
]
