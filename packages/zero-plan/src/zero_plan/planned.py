"""The findings of a dry run: what each rank holds, keeps alive at most, sends and stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

MEMORY_TIERS = ("device", "pinned host", "pageable host")
"""The tiers of memory that have a highest moment of their own."""


class HeldRow(NamedTuple):
    """Bytes of one kind of model state that a rank holds for one unit on one tier, as the engine counts them."""

    unit: str
    kind: str
    tier: str
    nbytes: int


class SentRow(NamedTuple):
    """Collectives of one phase for one unit in a step, and the bytes that the rank sends in them, as the engine's
    ledger counts them; ``across_bytes``: those that leave the node."""

    phase: str
    name: str
    calls: int
    sent_bytes: int
    across_bytes: int


class FileRow(NamedTuple):
    """The length of one file on NVMe."""

    name: str
    nbytes: int


class LiveRow(NamedTuple):
    """Bytes of one kind that a unit of the engine or a parameter owns, or ("activations") that were made while a module
    ran."""

    kind: str
    name: str
    nbytes: int


class Peak(NamedTuple):
    """The highest moment of a tier: bytes of all live tensors, what the engine did, which module ran, the largest
    owners, and what no unit of the engine owns."""

    tier: str
    nbytes: int
    phase: str
    place: str
    owners: tuple[LiveRow, ...]
    activation_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank.

    ``held``: model states between two steps. ``sent``: what a step sends once the engine has learned its orders; the
    phase "control" is its messages, whose size may depend on values. ``peaks``: the highest moments of the steps, by
    tier of memory, the device first. ``files``: on NVMe, after the steps. ``read``, ``written``: bytes of files that a
    step reads and writes.
    """

    rank: int
    held: tuple[HeldRow, ...]
    sent: tuple[SentRow, ...]
    peaks: tuple[Peak, ...]
    files: tuple[FileRow, ...] = ()
    read: int = 0
    written: int = 0

    @property
    def peak(self) -> Peak:
        """The highest moment on the device."""
        return self.peaks[0]

    def needs(self) -> dict[str, int]:
        """Return the bytes that the rank needs on each tier: "device", "pinned host", "pageable host", "nvme"."""
        found = {peak.tier: peak.nbytes for peak in self.peaks}
        return {**found, "nvme": sum(row.nbytes for row in self.files)} if self.files else found

    def held_bytes(self, tier: str = "device") -> int:
        """Return the bytes of all model states on a tier."""
        return sum(row.nbytes for row in self.held if row.tier == tier)

    def sent_bytes(self) -> int:
        """Return the bytes that a step sends, without messages."""
        return sum(row.sent_bytes for row in self.sent if row.phase != "control")


@dataclass(frozen=True)
class Plan:
    """The needs of a run's ranks; ``ranks`` are those that were asked for."""

    world_size: int
    ranks: tuple[RankPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {
            "world_size": self.world_size,
            "ranks": [
                {
                    "rank": rank.rank,
                    "held": [row._asdict() for row in rank.held],
                    "sent": [row._asdict() for row in rank.sent],
                    "peaks": [
                        {**peak._asdict(), "owners": [row._asdict() for row in peak.owners]} for peak in rank.peaks
                    ],
                    "files": [row._asdict() for row in rank.files],
                    "read": rank.read,
                    "written": rank.written,
                }
                for rank in self.ranks
            ],
        }
