"""Every K steps compare replicated data, weights with masters, resting states, and one unit's repeated gradient.

Read `auditor.py` first. `holdings.py` lists the replicated data; `module_calls.py`, `loss_graph.py` and
`recomputation.py` choose a module call and compute its gradient again."""

from __future__ import annotations

from .auditor import Auditor, Unaudited, auditor_for

__all__ = ["Auditor", "Unaudited", "auditor_for"]
