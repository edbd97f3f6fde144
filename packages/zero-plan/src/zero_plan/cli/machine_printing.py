"""The tables about a machine: needed and available bytes of each tier, and the least time of each resource."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..estimate import CAPACITY, Fit
from ..limits import Bound, StepTime, Wear
from ..quantities import format_quantity
from .printing import TextTable, format_seconds


def fits_table(rows: Iterable[Fit]) -> TextTable:
    """Return the table of the needed and available bytes of each tier in ``rows``, with a verdict on each."""
    return TextTable("does it fit", ("tier", "needed", "there is", "verdict"), tuple(_fit_cells(row) for row in rows))


def fit_status(rows: Sequence[Fit]) -> int:
    """Return the exit status of a command that judges tiers: 1 if one does not fit, 3 if all that are known do and the
    capacity of another is not known, else 0."""
    if any(row.fits is False for row in rows):
        return 1
    return 3 if any(row.fits is None for row in rows) else 0


def bounds_table(rows: Iterable[Bound], time: StepTime, title: str = "") -> TextTable:
    """Return the table of the least time of each resource in ``rows``. Its note names the resource that binds and the
    time that overlap can hide, from ``time``. ``title``: text before the table's own title.
    """
    cells = tuple(
        (
            row.resource,
            _format_amount(row),
            f"{row.key} is not given" if row.seconds is None else format_seconds(row.seconds),
        )
        for row in rows
    )
    note = (
        f"A step takes at least {format_seconds(time.least)}, bound by {time.binding}. Overlap can hide at most "
        f"{format_seconds(time.hidden)} of {format_seconds(time.most)}."
    )
    return TextTable(f"{title}least time of each resource", ("resource", "amount", "time"), cells, note)


def _format_amount(row: Bound) -> str:
    """Return the amount of a bound as text with its unit; "" for an amount in seconds, which the next column has."""
    if row.key == "device":
        return ""
    return format_quantity(row.amount, "FLOP" if row.resource.startswith(("matrix products", "attention")) else "B")


def wear_sentence(found: Wear) -> str:
    """Return a sentence that says how many bytes steps write to the drives of a node, and how many steps wear these
    out.
    """
    steps = "disk.endurance is not given" if found.steps is None else f"worn after {found.steps:,.0f} steps"
    return f"{found.terabytes_per_1000_steps:,.3g} TB are written per 1,000 steps and node; {steps}."


def _fit_cells(row: Fit) -> tuple[str, str, str, str]:
    """Return the cells of ``row`` in `fits_table`: tier, needed bytes, available bytes, verdict."""
    where = row.tier if row.tier == "device" else f"{row.tier} (of a node)"
    if row.capacity is None:
        return where, format_quantity(row.needed, "B"), "?", f"unknown: {CAPACITY[row.tier]} is not given"
    free = row.capacity - row.needed
    verdict = (
        f"fits, {format_quantity(free, 'B')} free"
        if free >= 0
        else f"does NOT fit, {format_quantity(-free, 'B')} too many"
    )
    return where, format_quantity(row.needed, "B"), format_quantity(row.capacity, "B"), verdict
