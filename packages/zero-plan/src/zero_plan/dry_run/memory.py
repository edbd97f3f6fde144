"""The live storages, their sizes, and the peak of their total on each tier."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
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

    ``kind``: the type of the computing device. ``where``: returns the current phase and place of the run.

    The size of a resized storage is read again when an operation returns a tensor over it. The sizes of storages that
    may be resized at any time are read again before a total counts as a peak: those that were resized before, and those
    that `expect_resizing` names. The work for an operation does not depend on the number of live storages.

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
    ) -> None:
        self._kind = kind
        self._where = where
        self.held: dict[int, LiveStorage] = {}
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.peak_places: dict[str, tuple[str, str]] = {}
        self._resizing: dict[int, LiveStorage] = {}  # by the storage's identity, as in ``held``
        self._changed: dict[str, dict[int, tuple[LiveStorage, int]]] = {}  # by tier: storages changed since its peak
        self._assigned: tuple[str, tuple[LiveRow, ...]] | None = None

    @contextmanager
    def assigning(self, tier: str, rows: tuple[LiveRow, ...]) -> Iterator[None]:
        """Inside the context, assign newly tracked storages to ``tier`` and to the owners in ``rows``. Contexts do not
        nest.
        """
        self._assigned = tier, rows
        try:
            yield
        finally:
            self._assigned = None

    def track(self, tensor: torch.Tensor) -> None:
        """Track a tensor's storage from now until it is freed, without keeping it alive, or update the size of one that
        is tracked already; a new highest total of its tier becomes the peak.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self.held.get(key)
        if held is None or held.reference() is not storage:
            reference = weakref.ref(storage, functools.partial(self._drop_freed, key))
            tier, rows = self._assigned or (self._tier(tensor), ())
            held = self.held[key] = LiveStorage(reference, 0, tier, self._where()[1], rows=rows)
        nbytes = storage.nbytes()
        if nbytes != held.nbytes:
            if held.nbytes:
                self._resizing[key] = held
            self._update(held, nbytes)

    def expect_resizing(self, tensor: torch.Tensor) -> None:
        """Have the size of a tensor's storage, which must be tracked, read again before each peak: something resizes it
        out of the sight of operations.
        """
        key = tensor.untyped_storage()._cdata
        self._resizing[key] = self.held[key]

    def reassign(self, held: LiveStorage, tier: str, rows: tuple[LiveRow, ...]) -> None:
        """Assign a storage to another tier and to the owners in ``rows``. ``peak`` does not change."""
        nbytes = held.nbytes
        self._change(held, 0)
        held.tier, held.rows = tier, rows
        self._change(held, nbytes)

    def refresh_sizes(self) -> None:
        """Re-read the size of every live storage and correct ``now``, for storages that were resized without a use of a
        tensor over them. ``peak`` does not change.
        """
        self._refresh(self.held.values())

    def reset_peaks(self) -> None:
        """Forget the peaks: each tier's current total is its first new one."""
        self.peak = dict(self.now)
        self.peak_places = dict.fromkeys(self.now, self._where())
        self._changed = {tier: {} for tier in self.now}

    def storages_at_peak(self, tier: str) -> list[tuple[LiveStorage, int]]:
        """Return the storages that made up the peak of a tier, and their sizes then; their owners are those known now.

        Call `refresh_sizes` first.
        """
        found = {id(held): (held, held.nbytes) for held in self.held.values() if held.tier == tier}
        found.update(self._changed.get(tier, {}))
        return [(held, nbytes) for held, nbytes in found.values() if nbytes]

    def _tier(self, tensor: torch.Tensor) -> str:
        """Return the tier of a tensor's memory, as a key of ``now``."""
        if tensor.device.type == self._kind:
            return "device"
        if tensor.device.type != "cpu":
            return tensor.device.type
        return "pinned host" if tensor.is_pinned() else "pageable host"

    def _update(self, held: LiveStorage, nbytes: int) -> None:
        """Set a storage's size to ``nbytes``. If its tier's total is a new peak, record it and its place, and forget
        which storages changed since the peak before.
        """
        tier = held.tier
        self._change(held, nbytes)
        if self.now[tier] > self.peak.get(tier, 0):
            self._refresh(self._resizing.values())
            if self.now[tier] > self.peak.get(tier, 0):
                self.peak[tier] = self.now[tier]
                self.peak_places[tier] = self._where()
                self._changed[tier] = {}

    def _refresh(self, storages: Iterable[LiveStorage]) -> None:
        """Re-read the sizes of ``storages`` and correct ``now``."""
        for held in list(storages):
            storage = held.reference()
            if storage is not None and storage.nbytes() != held.nbytes:
                self._change(held, storage.nbytes())

    def _change(self, held: LiveStorage, nbytes: int) -> None:
        """Set a storage's size and its tier's total; remember the size that it had at the tier's peak."""
        tier = held.tier
        self._changed.setdefault(tier, {}).setdefault(id(held), (held, held.nbytes))
        self.now[tier] = self.now.get(tier, 0) + nbytes - held.nbytes
        held.nbytes = nbytes

    def _drop_freed(self, key: int, _: object) -> None:
        """Stop tracking a freed storage, unless a new storage has its identity; called by its weak reference."""
        held = self.held.get(key)
        if held is not None and held.reference() is None:
            self._change(held, 0)
            del self.held[key]
            self._resizing.pop(key, None)
            if not self._changed[held.tier][id(held)][1]:
                del self._changed[held.tier][id(held)]
