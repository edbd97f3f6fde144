"""Activation checkpointing: recompute a segment of a model in backward, and keep its inputs where the section
`activation_checkpointing` says.

`Checkpointing` is the explicit object; the functions are for code without one at hand. Which object they use,
the innermost first: the one that `configure` set, in the context (thread or task) that called it and in contexts copied
from that; the running engine's, inside its forward and in what it recomputes; else one that only recomputes. There is
no other state. Read `segments.py` first.
"""

from __future__ import annotations

from .api import checkpoint, configure, is_configured, non_reentrant_checkpoint, reset
from .segments import Checkpointing

__all__ = ["Checkpointing", "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
