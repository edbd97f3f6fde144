"""The report of a tier on drives about itself."""

from __future__ import annotations

from typing import Protocol

__all__ = ["wear_report"]


class _Written(Protocol):
    """Something that writes to drives."""

    def bytes_written(self) -> int:
        """Return the bytes written so far."""

    def bytes_written_per_day(self) -> float:
        """Return the average rate, in bytes per day."""


def wear_report(name: str, tier: _Written) -> list[str]:
    """Return a line on what ``tier``, called ``name``, has written to drives; none if that is nothing."""
    if not tier.bytes_written():
        return []
    return [
        f"{name}: {tier.bytes_written()} bytes written to drives, {tier.bytes_written_per_day() / 1e12:.3f} TB per day"
    ]
