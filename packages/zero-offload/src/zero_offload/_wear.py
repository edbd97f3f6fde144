"""The report on how much was written to drives, which wears them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ._protocols import PathUse

__all__ = ["wear_report"]


class _Written(Protocol):
    """A tier or store that writes to drives."""

    def bytes_written(self) -> int:
        """Return the bytes written so far."""

    def bytes_written_per_day(self) -> float:
        """Return the average rate of writing, in bytes per day."""

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder, the bytes written and read so far, its speed and its state."""


def wear_report(name: str, tier: _Written) -> list[str]:
    """Return lines of text that begin with ``name``: one with the bytes that ``tier`` has written to drives, and one
    for each folder if there are several; an empty list if it has written nothing.
    """
    if not tier.bytes_written():
        return []
    uses = tier.path_use()
    return [
        f"{name}: {tier.bytes_written()} bytes written to drives, {tier.bytes_written_per_day() / 1e12:.3f} TB per day",
        *(
            f"{name}: {use.name} {use.state}, {use.share:.0%} of what is written from now on; "
            f"{use.bytes_written} bytes written, {use.bytes_read} read, {use.bytes_per_s / 1e9:.2f} GB/s"
            for use in (uses if len(uses) > 1 else ())
        ),
    ]
