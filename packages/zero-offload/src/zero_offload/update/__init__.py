"""The update of flat shards over tiers. Read `plans.py`, `_slices.py` and `_step.py`, then `update.py`."""

from __future__ import annotations

from .delayed import DelayedUpdate
from .placement import Placement
from .plans import FragmentPlan, ShardPlan, Weights
from .update import OffloadedUpdate

__all__ = ["DelayedUpdate", "FragmentPlan", "OffloadedUpdate", "Placement", "ShardPlan", "Weights"]
