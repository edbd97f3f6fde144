"""The update of flat shards over tiers. Read `plans.py`, `_slices.py` and `_step.py`, then `update.py`."""

from __future__ import annotations

from .delayed import DelayedUpdate
from .exact import ExactUpdate
from .plans import FragmentPlan, ShardPlan, Weights
from .tier_options import TierOptions
from .update import OffloadedUpdate

__all__ = ["DelayedUpdate", "ExactUpdate", "FragmentPlan", "OffloadedUpdate", "ShardPlan", "TierOptions", "Weights"]
