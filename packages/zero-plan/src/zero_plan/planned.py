"""The results of a dry run: what each rank holds, its peaks of memory, and what it sends and stores. A unit is the
parameters that the engine gathers and reduces together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MEMORY_TIERS = ("device", "pinned host", "pageable host")
"""The tiers of memory that have a peak of their own."""


class HeldRow(NamedTuple):
    """Bytes of one kind of model state that a rank holds for one unit on one tier, as the engine counts them."""

    unit: str
    kind: str
    tier: str
    nbytes: int


class SentRow(NamedTuple):
    """Collectives of one phase for one unit in a step, and the bytes that the rank sends in them, as the engine's
    ledger counts them; ``across_bytes``: the bytes that leave the node.
    """

    phase: str
    name: str
    calls: int
    sent_bytes: int
    across_bytes: int


class FileRow(NamedTuple):
    """One file on NVMe: its name and its length in bytes."""

    name: str
    nbytes: int


class LiveRow(NamedTuple):
    """Live bytes of one kind: owned by the unit or parameter ``name``, or ("activations") made while the module
    ``name`` ran.
    """

    kind: str
    name: str
    nbytes: int


class Peak(NamedTuple):
    """The peak of a tier: bytes of all live tensors, the engine's phase, the module that ran (``place``), the ten
    largest owners, and the bytes that no unit of the engine owns (``activation_bytes``).
    """

    tier: str
    nbytes: int
    phase: str
    place: str
    owners: tuple[LiveRow, ...]
    activation_bytes: int


@dataclass(frozen=True)
class SavedPlan:
    """What saving a checkpoint needs, after the steps and before training continues.

    ``peaks``: the peaks of memory during the save, as in `RankPlan`. ``files``: the files that the rank puts into the
    checkpoint, without the manifest and plain data; ``linked``: the names of files that are on its tier already and are
    linked, not written. ``message_nbytes``: host memory of the ranks' messages about their shards, not in ``peaks``.
    ``copied_nbytes``: host memory, not in ``peaks``, for the copies of a background save, kept until the run ends.
    """

    peaks: tuple[Peak, ...]
    files: tuple[FileRow, ...]
    linked: tuple[str, ...] = ()
    message_nbytes: int = 0
    copied_nbytes: int = 0

    @property
    def written(self) -> int:
        """Bytes that the rank writes: those of `files` that are not linked."""
        return sum(row.nbytes for row in self.files if row.name not in self.linked)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        files = [row._asdict() for row in self.files]
        return {
            "peaks": _peaks_as_dicts(self.peaks),
            "files": files,
            "linked": list(self.linked),
            "message_nbytes": self.message_nbytes,
            "copied_nbytes": self.copied_nbytes,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SavedPlan:
        """Return the plan that the result of `as_dict` describes."""
        files = tuple(FileRow(**row) for row in data["files"])
        numbers = data["message_nbytes"], data.get("copied_nbytes", 0)
        return cls(_peaks_from_dicts(data["peaks"]), files, tuple(data["linked"]), *numbers)


@dataclass(frozen=True)
class LoadedPlan:
    """The memory and transfers of loading a checkpoint into a new engine.

    ``saved_by``: the number of ranks that saved it. ``peaks``: the peaks of memory during the load, as in `RankPlan`.
    ``read``: bytes that the rank reads of the checkpoint's data files; ``written``: bytes that it writes to its tier on
    NVMe. ``scratch_nbytes``: the most host memory, beside ``peaks``, for slices of which the rank needs a part.
    """

    saved_by: int
    peaks: tuple[Peak, ...]
    read: int
    written: int = 0
    scratch_nbytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {**vars(self), "peaks": _peaks_as_dicts(self.peaks)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LoadedPlan:
        """Return the plan that the result of `as_dict` describes."""
        return cls(**{**data, "peaks": _peaks_from_dicts(data["peaks"])})


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank: memory, files, traffic and operations.

    ``held``: model states between two steps. ``sent``: the collectives of a step, once the engine has learned the
    order of its units; the phase "control" has its control messages, whose size may depend on values. ``peaks``:
    the peaks during the steps, by tier of memory, the device first. ``files``: on NVMe, after the steps. ``read``,
    ``written``: bytes that a step reads from and writes to files. ``flops``: floating-point operations of a step by
    the dtype that they compute in, and ``attention`` those among them of fused attention; ``moved``: bytes of
    device memory that its other operations read and write at least, without the optimizer's. ``saved``, ``loaded``:
    what saving a checkpoint after the steps needs, and loading one into a new engine; None if it was not asked for.
    ``stage``, ``accumulation``: the engine's stage and micro-batches per step.
    """

    rank: int
    held: tuple[HeldRow, ...]
    sent: tuple[SentRow, ...]
    peaks: tuple[Peak, ...]
    files: tuple[FileRow, ...] = ()
    read: int = 0
    written: int = 0
    flops: Mapping[str, int] = field(default_factory=dict)
    saved: SavedPlan | None = None
    loaded: LoadedPlan | None = None
    stage: int = 0
    accumulation: int = 1
    moved: int = 0
    attention: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> Peak:
        """The peak on the device, the first of `peaks`."""
        return self.peaks[0]

    def needs(self) -> dict[str, int]:
        """Return the bytes that the rank needs on each tier ("device", "pinned host", "pageable host", "nvme") for the
        steps, and for the save and the load that were planned. Tiers that it does not use are absent.
        """
        moments = [_peak_bytes(self.peaks)]
        kept = 0
        if self.saved is not None:
            kept = self.saved.copied_nbytes
            moments.append(_peak_bytes(self.saved.peaks, self.saved.message_nbytes))
        if self.loaded is not None:
            moments.append(_peak_bytes(self.loaded.peaks, self.loaded.scratch_nbytes))
        found = {tier: max(moment.get(tier, 0) for moment in moments) for tier in MEMORY_TIERS}
        found["pageable host"] += kept
        found["nvme"] = sum(row.nbytes for row in self.files)
        return {tier: nbytes for tier, nbytes in found.items() if nbytes}

    def held_bytes(self, tier: str = "device") -> int:
        """Return the bytes of all model states that the rank holds on ``tier``: "device", "host" or "nvme"."""
        return sum(row.nbytes for row in self.held if row.tier == tier)

    def sent_bytes(self) -> int:
        """Return the bytes that the rank sends in a step, without control messages."""
        return sum(row.sent_bytes for row in self.sent if row.phase != "control")

    def bytes_by_link(self) -> dict[str, int]:
        """Return the bytes that a step of this rank moves over each link: "inside a node" and "between nodes" (sent,
        without control messages), "disk read", "disk write".
        """
        across = sum(row.across_bytes for row in self.sent if row.phase != "control")
        inside = self.sent_bytes() - across
        return {"inside a node": inside, "between nodes": across, "disk read": self.read, "disk write": self.written}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {
            "rank": self.rank,
            "held": [row._asdict() for row in self.held],
            "sent": [row._asdict() for row in self.sent],
            "peaks": _peaks_as_dicts(self.peaks),
            "files": [row._asdict() for row in self.files],
            "read": self.read,
            "written": self.written,
            "flops": dict(self.flops),
            "saved": None if self.saved is None else self.saved.as_dict(),
            "loaded": None if self.loaded is None else self.loaded.as_dict(),
            "stage": self.stage,
            "accumulation": self.accumulation,
            "moved": self.moved,
            "attention": dict(self.attention),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RankPlan:
        """Return the plan that the result of `as_dict` describes."""
        return cls(
            data["rank"],
            tuple(HeldRow(**row) for row in data["held"]),
            tuple(SentRow(**row) for row in data["sent"]),
            _peaks_from_dicts(data["peaks"]),
            tuple(FileRow(**row) for row in data["files"]),
            data["read"],
            data["written"],
            data["flops"],
            None if data.get("saved") is None else SavedPlan.from_dict(data["saved"]),
            None if data.get("loaded") is None else LoadedPlan.from_dict(data["loaded"]),
            data.get("stage", 0),
            data.get("accumulation", 1),
            data.get("moved", 0),
            data.get("attention", {}),
        )


@dataclass(frozen=True)
class Plan:
    """The needs of the planned ranks of a run; ``world_size``: of the run."""

    world_size: int
    ranks: tuple[RankPlan, ...]

    def written_per_node(self, devices: int) -> int:
        """Return the bytes that a step writes to the drives of a node with ``devices`` ranks, if each writes as many as
        the planned rank that writes most.
        """
        return min(devices, self.world_size) * max((rank.written for rank in self.ranks), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {"world_size": self.world_size, "ranks": [rank.as_dict() for rank in self.ranks]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Return the plan that the result of `as_dict` describes."""
        return cls(data["world_size"], tuple(RankPlan.from_dict(rank) for rank in data["ranks"]))


def _peak_bytes(peaks: tuple[Peak, ...], beside: int = 0) -> dict[str, int]:
    """Return the bytes of ``peaks`` by tier; ``beside``: bytes of pageable host memory to add, which they do not
    include.
    """
    found = {peak.tier: peak.nbytes for peak in peaks}
    found["pageable host"] = found.get("pageable host", 0) + beside
    return found


def _peaks_as_dicts(peaks: tuple[Peak, ...]) -> list[dict[str, Any]]:
    """Return peaks as plain data for JSON."""
    return [{**peak._asdict(), "owners": [row._asdict() for row in peak.owners]} for peak in peaks]


def _peaks_from_dicts(rows: list[dict[str, Any]]) -> tuple[Peak, ...]:
    """Return the peaks that ``rows``, the result of `_peaks_as_dicts`, describe."""
    return tuple(Peak(**{**row, "owners": tuple(LiveRow(**owner) for owner in row["owners"])}) for row in rows)
