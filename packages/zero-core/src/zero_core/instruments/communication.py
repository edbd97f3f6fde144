"""The ledger of what was sent, as a table and line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_comm import Ledger, Tag

from ..errors import UsageError
from ..text import mebibytes, say, table

if TYPE_CHECKING:
    from zero_config import Config

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
"""Operations as DeepSpeed's ``comms_logger.prof_ops`` names them -> phases of the ledger that do their work here."""

_KNOWN = ("gather", "reduce", "publish", "broadcast", "control", "checkpoint")


def chosen_phases(config: Config) -> frozenset[str] | None:
    """The phases that ``comms_logger`` asks for; None for all. Raises `UsageError` for an operation nobody knows."""
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
    """Collectives and bytes that this rank sent since the start, by phase and by unit or parameter, and what of that
    left its node."""
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


class SpokenLedger(Ledger):
    """A ledger that also says every collective when it starts (``comms_logger.verbose``)."""

    def __init__(self, phases: frozenset[str] | None) -> None:
        super().__init__()
        self._phases = phases

    def count(self, tag: Tag, sent_bytes: int, across_bytes: int = 0) -> None:
        """Add one collective, and say it."""
        super().count(tag, sent_bytes, across_bytes)
        if self._phases is None or tag.phase in self._phases:
            say(f"{tag}: {sent_bytes:,} bytes sent" + (f", {across_bytes:,} to other nodes" if across_bytes else ""))


def ledger_for(config: Config, rank: int) -> Ledger:
    """The ledger that ``comms_logger`` asks for, on this rank."""
    phases = chosen_phases(config)
    section = config.comms_logger
    return SpokenLedger(phases) if section.enabled and section.verbose and rank == 0 else Ledger()
