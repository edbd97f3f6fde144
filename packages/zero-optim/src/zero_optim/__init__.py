"""Optimizers and learning rate schedules that torch does not have.

Read `lion.py` first; `one_bit/adam.py` is where ranks come in. `schedules/base.py` begins the schedules.
"""

from __future__ import annotations

from .base import ClosureOptimizer
from .lamb import Lamb
from .lion import Lion
from .muon import MuonWithAdam
from .one_bit import OneBitAdam, OneBitLamb, OneBitOptimizer, ZeroOneAdam
from .schedules import LRRangeTest, NotSteppedError, OneCycle, Scheduler, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "ClosureOptimizer",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "MuonWithAdam",
    "NotSteppedError",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitOptimizer",
    "OneCycle",
    "Scheduler",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroOneAdam",
]
