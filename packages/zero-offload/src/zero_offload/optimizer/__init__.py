"""An optimizer whose masters and states live on a tier. Read `_entries.py` first, then `_update.py`."""

from __future__ import annotations

from .optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer"]
