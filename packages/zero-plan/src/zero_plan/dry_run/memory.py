"""The live storages, their sizes, and the peak of their sum."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..planned import LiveRow


@dataclass
class LiveStorage:
    """A live storage: its size when it was last read, its tier, the place of the run in which it was made, the kind and
    name of its owner, if known, and the rows of a block of host memory with several owners.
    """

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    tier: str
    origin: str
    owner: tuple[str, str] | None = None
    rows: tuple[LiveRow, ...] = ()


class LiveMemory:
    """Tracks each storage from its first tensor until it is freed, on every tier.

    ``kind``: the type of the computing device. ``where``: returns the current phase and place of the run. ``at_peak``:
    called with the tier just before its total drops from a new peak.

    The size of a resized storage is read again when a tensor over it is used, and all sizes are before a sum counts as
    a peak.

    Attributes:
        held: the live storages, by the storage's identity.
        now, peak: bytes by tier: "device", "pinned host", "pageable host", or the type of another device.
        moments: phase and place of the last peaks, by tier.
    """

    def __init__(
        self,
        kind: str = "cpu",
        where: Callable[[], tuple[str, str]] = lambda: ("", ""),
        at_peak: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._kind = kind
        self._where = where
        self._at_peak = at_peak
        self.held: dict[int, LiveStorage] = {}
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.moments: dict[str, tuple[str, str]] = {}
        self._unreported: set[str] = set()
        self._taking: tuple[str, tuple[LiveRow, ...]] | None = None

    @contextmanager
    def taking(self, tier: str, rows: tuple[LiveRow, ...]) -> Iterator[None]:
        """Count storages that are first met inside the context to a tier, and to the owners in ``rows``."""
        self._taking = tier, rows
        try:
            yield
        finally:
            self._taking = None

    def meet(self, tensor: torch.Tensor) -> None:
        """Track a tensor's storage and update its size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self.held.get(key)
        if held is None or held.reference() is not storage:
            reference = weakref.ref(storage, functools.partial(self._gone, key))
            tier, rows = self._taking or (self._tier(tensor), ())
            held = self.held[key] = LiveStorage(reference, 0, tier, self._where()[1], rows=rows)
        nbytes = storage.nbytes()
        if nbytes != held.nbytes:
            self._update(held, nbytes)

    def move(self, held: LiveStorage, tier: str, rows: tuple[LiveRow, ...]) -> None:
        """Count a storage to another tier, and to the owners in ``rows``."""
        nbytes = held.nbytes
        self._change(held, 0)
        held.tier, held.rows = tier, rows
        self._change(held, nbytes)

    def refresh_sizes(self) -> None:
        """Re-read the size of every live storage and correct ``now``, for storages that were resized without a use of a
        tensor over them. Never raises ``peak``.
        """
        for held in list(self.held.values()):
            storage = held.reference()
            if storage is not None and storage.nbytes() != held.nbytes:
                self._change(held, storage.nbytes())

    def restart(self) -> None:
        """Start a new search for peaks; the current totals are the first."""
        self.peak = dict(self.now)
        self.moments = dict.fromkeys(self.now, self._where())
        self._unreported = {tier for tier, nbytes in self.now.items() if nbytes}

    def report_last_peaks(self) -> None:
        """Call ``at_peak`` for peaks that no drop has followed yet."""
        for tier in sorted(self._unreported):
            self._at_peak(tier)
        self._unreported.clear()

    def _tier(self, tensor: torch.Tensor) -> str:
        if tensor.device.type == self._kind:
            return "device"
        if tensor.device.type != "cpu":
            return tensor.device.type
        return "pinned host" if tensor.is_pinned() else "pageable host"

    def _update(self, held: LiveStorage, nbytes: int) -> None:
        """Set a storage's size, and record a new peak of its tier."""
        tier = held.tier
        self._change(held, nbytes)
        if self.now[tier] > self.peak.get(tier, 0):
            self.refresh_sizes()
            if self.now[tier] > self.peak.get(tier, 0):
                self.peak[tier] = self.now[tier]
                self.moments[tier] = self._where()
                self._unreported.add(tier)

    def _change(self, held: LiveStorage, nbytes: int) -> None:
        """Set a storage's size and its tier's total; report an unreported peak first if the total drops."""
        tier = held.tier
        if nbytes < held.nbytes and tier in self._unreported:
            self._unreported.discard(tier)
            self._at_peak(tier)
        self.now[tier] = self.now.get(tier, 0) + nbytes - held.nbytes
        held.nbytes = nbytes

    def _gone(self, key: int, _: object) -> None:
        held = self.held.get(key)
        if held is not None and held.reference() is None:
            self._change(held, 0)
            del self.held[key]
