"""Errors of sequence parallelism."""

from __future__ import annotations


class SequenceError(ValueError):
    """A model, a batch or a number of ranks does not fit sequence parallelism; the message says what would."""
