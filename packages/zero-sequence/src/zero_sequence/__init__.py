"""Sequence parallelism and tiled compute, for sequences that one rank cannot hold."""

from __future__ import annotations

from .errors import SequenceError

__all__ = ["SequenceError"]
