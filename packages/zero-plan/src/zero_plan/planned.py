"""The findings of a dry run: what each rank holds and sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


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


class LiveRow(NamedTuple):
    """Bytes of one kind that a unit of the engine owns, or ("activations") that were made while a module ran."""

    kind: str
    name: str
    nbytes: int


class Peak(NamedTuple):
    """The highest moment: bytes of all live tensors, what the engine did, which module ran, the largest owners, and
    what no unit of the engine owns."""

    nbytes: int
    phase: str
    place: str
    owners: tuple[LiveRow, ...]
    activation_bytes: int


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank.

    ``held``: model states between two steps. ``sent``: what a step sends once the engine has learned its orders; the
    phase "control" is its messages, whose size may depend on values. ``peak``: the highest
    moment of the steps on the device.
    """

    rank: int
    held: tuple[HeldRow, ...]
    sent: tuple[SentRow, ...]
    peak: Peak

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
                    "peak": {**rank.peak._asdict(), "owners": [row._asdict() for row in rank.peak.owners]},
                }
                for rank in self.ranks
            ],
        }
