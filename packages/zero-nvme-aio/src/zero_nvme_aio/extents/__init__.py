"""Named extents in files on one or more devices, in generations. Read `_ranges.py` first, then `_store.py`."""

from __future__ import annotations

from ._generation import Extent, Generation
from ._store import ExtentStore, StoreRequest

__all__ = ["Extent", "ExtentStore", "Generation", "StoreRequest"]
