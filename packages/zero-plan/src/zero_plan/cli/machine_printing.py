"""The tables about a machine: needed and available bytes of each tier, and the least time of each resource."""

from __future__ import annotations

from collections.abc import Iterable

from ..estimate import Fit
from ..limits import Bound, StepTime
from ..quantities import format_quantity
from .printing import format_seconds, print_table


def print_fits(rows: Iterable[Fit]) -> None:
    """Print the needed and available bytes of each tier, and whether they fit."""
    print_table("does it fit", ("tier", "needed", "there is", "verdict"), [_verdict(row) for row in rows])


def print_bounds(rows: Iterable[Bound], time: StepTime) -> None:
    """Print the least time of each resource, the resource that binds, and the time that overlap can hide."""
    table = [
        (
            row.resource,
            format_quantity(row.amount, "FLOP" if row.resource.startswith("matrix products") else "B"),
            f"{row.key} is not given" if row.seconds is None else format_seconds(row.seconds),
        )
        for row in rows
    ]
    print_table("least time of each resource", ("resource", "amount", "time"), table)
    print(
        f"A step takes at least {format_seconds(time.least)}, bound by {time.binding}. Overlap can hide at most "
        f"{format_seconds(time.hidden)} of {format_seconds(time.most)}."
    )


def _verdict(row: Fit) -> tuple[str, str, str, str]:
    """Return the cells of one tier: its name, needed bytes, available bytes, verdict."""
    where = row.tier if row.tier == "device" else f"{row.tier} (of a node)"
    if row.capacity is None:
        return where, format_quantity(row.needed, "B"), "?", "its capacity is not given"
    free = row.capacity - row.needed
    verdict = (
        f"fits, {format_quantity(free, 'B')} free"
        if free >= 0
        else f"does NOT fit, {format_quantity(-free, 'B')} too many"
    )
    return where, format_quantity(row.needed, "B"), format_quantity(row.capacity, "B"), verdict
