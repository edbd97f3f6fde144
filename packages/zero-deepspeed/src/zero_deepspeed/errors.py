"""The error of a name of DeepSpeed that is not available."""

from __future__ import annotations

from zero_core.errors import UsageError


class UnsupportedError(UsageError, NotImplementedError):
    """A name of DeepSpeed is not available here; the message says what to use instead."""
