"""Achieved and peak speeds of links and drives. A link is one kind of transfer, between ranks, to the host or to
drives; a drive's link is named as the tier's spans, such as ``drive, shards in``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..record.parsing import Block
from ..record.schema import COLLECTIVES, TIERS, SpanKind

_DRIVE = "drive, "


@dataclass
class Link:
    """One kind of transfer over all ranks, of ``nbytes`` bytes in all.

    ``busy``: seconds in which a rank had one under way, summed over ranks; ``waited``: seconds in which it only waited;
    ``peak``: bytes per second of one rank, 0 if not known; ``source``: where the peak is from; ``folder``: of a drive's
    files, as configured, else empty.
    """

    name: str
    nbytes: int
    busy: float
    waited: float
    peak: float
    source: str
    folder: str = ""

    @property
    def full_name(self) -> str:
        """The link's name, for a drive with the folder of its files: ``drive /mnt/nvme, shards in``."""
        return self.name.replace(_DRIVE, f"drive {self.folder}, ", 1) if self.folder else self.name

    @property
    def rate(self) -> float:
        """The achieved speed: bytes per second of one rank while it had a transfer under way."""
        return self.nbytes / self.busy if self.busy else 0.0

    @property
    def of_peak(self) -> float:
        """The rate as a fraction of the peak, 0 to 1; 0 if the peak is not known."""
        return self.rate / self.peak if self.peak else 0.0


class LinkSums:
    """Sums up the transfers of each link (between ranks, to the host, to drives), step by step: call `add` for every
    step, then `result`.
    """

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def add(self, blocks: Mapping[int, Block]) -> None:
        """Add the transfers of one step; ``blocks``: the step's spans by rank."""
        for block in blocks.values():
            _add_transfers(self._links, block)

    def result(self, notes: Iterable[Mapping[str, Any]], folder: str) -> list[Link]:
        """Return the links of all steps added so far, the busiest first. ``notes``: those of all ranks' records;
        ``folder``: of the drives' files, as text.

        A link's peak is that of a note (``"note": "peak"`` with ``link`` and ``bytes_per_second``), else the rate of
        the fastest rank and step.
        """
        for note in notes:
            for link in self._links.values():
                if note["note"] == "peak" and is_named_by(link.name, str(note.get("link"))):
                    link.peak, link.source = float(note["bytes_per_second"]), str(note.get("source", "measured"))
        for link in self._links.values():
            if link.name.startswith(_DRIVE):
                link.folder = folder
        return sorted(self._links.values(), key=lambda link: -link.busy)


def _add_transfers(links: dict[str, Link], block: Block) -> None:
    """Add the transfers in ``block``, one rank's step, to ``links`` by name, and raise a link's peak to this step's
    rate if that is higher; new links are added."""
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for span in block.spans:
        if (span.nbytes or span.waited) and (span.kind in COLLECTIVES or span.kind in TIERS):
            found.setdefault(link_name(span.kind, span.name), []).append(
                (span.begin, span.end, span.nbytes, span.waited)
            )
    for name, transfers in found.items():
        busy = union_length((begin, end) for begin, end, moved, _ in transfers if moved) / 1e6
        nbytes = sum(transfer[2] for transfer in transfers)
        link = links.setdefault(name, Link(name, 0, 0.0, 0.0, 0.0, "fastest step of this run"))
        link.nbytes += nbytes
        link.busy += busy
        link.waited += sum(transfer[3] for transfer in transfers) / 1e6
        link.peak = max(link.peak, nbytes / busy if busy else 0.0)


def link_name(kind: int, name: str) -> str:
    """Return the name of a transfer's link: for tiers the text before the colon of the span's ``name``, for collectives
    their kind."""
    return name.partition(":")[0] if kind in TIERS else SpanKind(kind).name.lower()


def is_named_by(name: str, named: str) -> bool:
    """Return whether the link ``name`` is meant by ``named``, the ``link`` of a note about a peak: the same name, or
    ``drive in`` or ``drive out``, which mean all drives."""
    return name == named or (name.startswith(_DRIVE) and named == f"drive {name.rpartition(' ')[2]}")


def union_length(intervals: Iterable[tuple[int, int]]) -> float:
    """Return the length of the union of (begin, end) intervals, so that overlaps count once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
