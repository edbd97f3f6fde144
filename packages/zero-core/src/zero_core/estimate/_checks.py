"""Arguments that more than one estimate takes."""

from __future__ import annotations

from zero_core.errors import UsageError


def at_least_one(**values: int) -> None:
    """Raise `UsageError` for the first value that is no integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}: expected an integer >= 1, got {value!r}")
