"""The error of a name that is not answered."""

from __future__ import annotations

from zero_core.errors import UsageError


class UnsupportedError(UsageError, NotImplementedError):
    """A name of DeepSpeed that is not answered here; the message says what to use."""
