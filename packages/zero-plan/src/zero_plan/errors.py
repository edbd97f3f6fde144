"""The error of this package."""

from __future__ import annotations


class PlanError(ValueError):
    """An argument, a machine file or a preset that cannot be planned with; the message says what was expected."""
