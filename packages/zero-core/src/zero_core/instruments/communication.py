"""Print the ledger of collectives as a table, or each collective as it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_comm import Ledger, Tag

from ..errors import UsageError
from ..text import mebibytes, say, table

if TYPE_CHECKING:
    from zero_settings import Config

PHASES = {
    "all_gather": ("gather", "publish"),
    "all_gather_into_tensor": ("gather", "publish"),
    "all_reduce": ("reduce",),
    "barrier": ("control",),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "reduce_scatter": ("reduce",),
    "reduce_scatter_tensor": ("reduce",),
}
"""Phases of the ledger by the operations that DeepSpeed's ``comms_logger.prof_ops`` names."""

_KNOWN = ("gather", "reduce", "publish", "broadcast", "control", "checkpoint", "exchange")


def chosen_phases(config: Config) -> frozenset[str] | None:
    """Return the phases of collectives that ``comms_logger`` names; None for all. Raises `UsageError` for unknown
    names."""
    section = config.comms_logger
    if section.prof_all or not section.prof_ops:
        return None
    chosen: set[str] = set()
    for name in section.prof_ops:
        if name not in PHASES and name not in _KNOWN:
            raise UsageError(
                f"comms_logger.prof_ops: expected some of {', '.join(sorted({*PHASES, *_KNOWN}))}, got {name!r}"
            )
        chosen.update(PHASES.get(name, (name,)))
    return frozenset(chosen)


def communication_table(ledger: Ledger, phases: frozenset[str] | None = None, steps: int = 0) -> str:
    """Return a table of the collectives in ``ledger``, by phase and by unit or parameter: their number, and MiB sent by
    this rank in all and to other nodes. ``phases``: None for all; ``steps``: the divisor for MiB per step."""
    rows: dict[tuple[str, str], tuple[int, int, int]] = {}
    for phase, name, row in ledger:
        if phases is None or phase in phases:
            for key in ((phase, ""), (phase, name)):
                calls, sent, across = rows.get(key, (0, 0, 0))
                rows[key] = (calls + row.calls, sent + row.sent_bytes, across + row.across_bytes)
    per_step = max(steps, 1)
    return table(
        ("sent by this rank", "collectives", "MiB", "MiB per step", "MiB across nodes"),
        [
            (f"  {name}" if name else phase, f"{calls:,}", *map(mebibytes, (sent, sent / per_step, across)))
            for (phase, name), (calls, sent, across) in sorted(rows.items())
        ],
    )


class PrintingLedger(Ledger):
    """A ledger that also prints or logs each collective of ``phases`` (None: all) when it starts."""

    def __init__(self, phases: frozenset[str] | None) -> None:
        super().__init__()
        self._phases = phases

    def count(self, tag: Tag, sent_bytes: int, across_bytes: int = 0) -> None:
        """Count one collective, and print it if its phase is one of ``phases``. Bytes are those that this rank
        sends."""
        super().count(tag, sent_bytes, across_bytes)
        if self._phases is None or tag.phase in self._phases:
            say(f"{tag}: {sent_bytes:,} bytes sent" + (f", {across_bytes:,} to other nodes" if across_bytes else ""))


def ledger_for(config: Config, rank: int) -> Ledger:
    """Return a new ledger as ``comms_logger`` asks for it; only rank 0 prints collectives. It measures times on devices
    if ``comms_logger`` is enabled or ``wall_clock_breakdown`` is on."""
    phases = chosen_phases(config)
    section = config.comms_logger
    ledger = PrintingLedger(phases) if section.enabled and section.verbose and rank == 0 else Ledger()
    ledger.times_devices = section.enabled or config.wall_clock_breakdown
    return ledger
