"""The tables about a machine: needed and available bytes of each tier, and the least time of each resource."""

from __future__ import annotations

from collections.abc import Iterable

from ..estimate import Fit
from ..limits import Bound, StepTime
from ..quantities import show
from .printing import print_table, show_seconds


def print_fits(rows: Iterable[Fit]) -> None:
    """Print the needed and available bytes of each tier, and whether they fit."""
    print_table("does it fit", ("tier", "needed", "there is", "verdict"), [_verdict(row) for row in rows])


def print_bounds(rows: Iterable[Bound], time: StepTime) -> None:
    """Print the least time of each resource, the resource that binds, and the time that overlap can hide."""
    table = [
        (
            row.resource,
            show(row.amount, "FLOP" if row.resource.startswith("matrix products") else "B"),
            f"{row.key} is not given" if row.seconds is None else show_seconds(row.seconds),
        )
        for row in rows
    ]
    print_table("least time of each resource", ("resource", "amount", "time"), table)
    print(
        f"A step takes at least {show_seconds(time.least)}, bound by {time.binding}. Overlap can hide at most "
        f"{show_seconds(time.hidden)} of {show_seconds(time.most)}."
    )


def _verdict(row: Fit) -> tuple[str, str, str, str]:
    """Return the cells of one tier: its name, needed bytes, available bytes, verdict."""
    where = row.tier if row.tier == "device" else f"{row.tier} (of a node)"
    if row.capacity is None:
        return where, show(row.needed, "B"), "?", "its capacity is not given"
    free = row.capacity - row.needed
    verdict = f"fits, {show(free, 'B')} free" if free >= 0 else f"does NOT fit, {show(-free, 'B')} too many"
    return where, show(row.needed, "B"), show(row.capacity, "B"), verdict
