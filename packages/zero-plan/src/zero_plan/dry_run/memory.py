"""The live storages, their sizes, and the peak of their total on each tier."""

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
    """A storage that is still alive.

    ``nbytes``: its size when it was last read. ``origin``: the place of the run (a module's name) where it was made.
    ``owner``: the kind and name of its owner, None while it is not known. ``rows``: its owners and their bytes, where
    they were given; ``owner`` is None then.
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

    The size of a resized storage is read again when an operation returns a tensor over it; all sizes are read again
    before a total counts as a peak.

    Attributes:
        held: the live storages, by the storage's identity.
        now, peak: current and highest total in bytes, by tier: "device", "pinned host", "pageable host", or the type of
            another device.
        peak_places: phase and place of the run at the peak, by tier.
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
        self.peak_places: dict[str, tuple[str, str]] = {}
        self._unreported: set[str] = set()
        self._assigned: tuple[str, tuple[LiveRow, ...]] | None = None

    @contextmanager
    def assigning(self, tier: str, rows: tuple[LiveRow, ...]) -> Iterator[None]:
        """Inside the context, assign newly tracked storages to ``tier`` and to the owners in ``rows``."""
        self._assigned = tier, rows
        try:
            yield
        finally:
            self._assigned = None

    def track(self, tensor: torch.Tensor) -> None:
        """Track a tensor's storage from now on, or update the size of one that is tracked already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self.held.get(key)
        if held is None or held.reference() is not storage:
            reference = weakref.ref(storage, functools.partial(self._drop_freed, key))
            tier, rows = self._assigned or (self._tier(tensor), ())
            held = self.held[key] = LiveStorage(reference, 0, tier, self._where()[1], rows=rows)
        nbytes = storage.nbytes()
        if nbytes != held.nbytes:
            self._update(held, nbytes)

    def reassign(self, held: LiveStorage, tier: str, rows: tuple[LiveRow, ...]) -> None:
        """Assign a storage to another tier and to the owners in ``rows``. Never raises ``peak``."""
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

    def reset_peaks(self) -> None:
        """Forget the peaks: each tier's current total is its first new one."""
        self.peak = dict(self.now)
        self.peak_places = dict.fromkeys(self.now, self._where())
        self._unreported = {tier for tier, nbytes in self.now.items() if nbytes}

    def report_last_peaks(self) -> None:
        """Call ``at_peak`` for every tier whose total has not dropped since its last peak."""
        for tier in sorted(self._unreported):
            self._at_peak(tier)
        self._unreported.clear()

    def _tier(self, tensor: torch.Tensor) -> str:
        """Return the tier of a tensor's memory, as a key of ``now``."""
        if tensor.device.type == self._kind:
            return "device"
        if tensor.device.type != "cpu":
            return tensor.device.type
        return "pinned host" if tensor.is_pinned() else "pageable host"

    def _update(self, held: LiveStorage, nbytes: int) -> None:
        """Set a storage's size; record the peak if its tier's total is a new one."""
        tier = held.tier
        self._change(held, nbytes)
        if self.now[tier] > self.peak.get(tier, 0):
            self.refresh_sizes()
            if self.now[tier] > self.peak.get(tier, 0):
                self.peak[tier] = self.now[tier]
                self.peak_places[tier] = self._where()
                self._unreported.add(tier)

    def _change(self, held: LiveStorage, nbytes: int) -> None:
        """Set a storage's size and its tier's total; report an unreported peak first if the total drops."""
        tier = held.tier
        if nbytes < held.nbytes and tier in self._unreported:
            self._unreported.discard(tier)
            self._at_peak(tier)
        self.now[tier] = self.now.get(tier, 0) + nbytes - held.nbytes
        held.nbytes = nbytes

    def _drop_freed(self, key: int, _: object) -> None:
        """Stop tracking a freed storage, unless a new storage has its identity; called by its weak reference."""
        held = self.held.get(key)
        if held is not None and held.reference() is None:
            self._change(held, 0)
            del self.held[key]
