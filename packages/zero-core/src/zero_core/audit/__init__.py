"""Every K steps: what ranks hold alike, masters against weights, states at rest, one unit's gradient computed again.

Read `auditor.py` first; `holdings.py` says what is compared, `module_calls.py`, `loss_graph.py` and
`recomputation.py` which call of a module is repeated, and how its gradient is computed again.
"""

from __future__ import annotations

from .auditor import Auditor, Unaudited, auditor_for

__all__ = ["Auditor", "Unaudited", "auditor_for"]
