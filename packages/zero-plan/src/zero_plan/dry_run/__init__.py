"""The real engine over tensors without memory. Read `rank.py` first.

`world.py` makes torch.distributed any rank of a world of any size, `fakes.py` has tensors with shapes and no values,
`memory.py` tracks their storages, `peak_watch.py` finds the peak of each tier and the owners of its bytes.
"""

from __future__ import annotations

from .loading import plan_ranks
from .rank import DryRun

__all__ = ["DryRun", "plan_ranks"]
