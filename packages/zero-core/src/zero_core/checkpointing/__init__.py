"""Activation checkpointing: recompute segments of a model in backward, with their inputs stored as the section
`activation_checkpointing` says.

`Checkpointing` is the explicit object; the functions are for code that has none. They use the first that exists of: the
object that `configure` made, in the context (thread or task) that called it and in contexts copied from that; the
running engine's, inside its forward and recomputation; one that only recomputes. Read `segments.py` first."""

from __future__ import annotations

from .api import checkpoint, configure, is_configured, non_reentrant_checkpoint, reset
from .segments import Checkpointing

__all__ = ["Checkpointing", "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
