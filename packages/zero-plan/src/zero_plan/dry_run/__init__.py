"""The real engine over tensors without memory. Read `rank.py` first.

`world.py` makes torch.distributed any rank of a world of any size, `fakes.py` has tensors that have shapes and no
values, `memory.py` follows their storages, `peak_watch.py` finds their highest moment
and its owners.
"""

from __future__ import annotations

from .rank import rehearse

__all__ = ["rehearse"]
