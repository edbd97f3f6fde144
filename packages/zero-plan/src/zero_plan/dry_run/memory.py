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
        """Inside the block, assign storages that `track` sees for the first time to ``tier`` and to the owners in
        ``rows``. Such blocks do not nest.
        """
        self._assigned = tier, rows
        try:
            yield
        finally:
            self._assigned = None

    def track(self, tensor: torch.Tensor) -> None:
        """Track the storage of ``tensor`` until it is freed, without keeping it alive; if it is tracked already, update
        its size. A new highest total of its tier becomes the peak.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self.held.get(key)
        if held is None or held.reference() is not storage:
            reference = weakref.ref(storage, functools.partial(self._drop_freed, key))
            tier, rows = self._assigned or (self._tier_of(tensor), ())
            held = self.held[key] = LiveStorage(reference, 0, tier, self._where()[1], rows=rows)
        nbytes = storage.nbytes()
        if nbytes != held.nbytes:
            if held.nbytes:
                self._resizing[key] = held
            self._update_size(held, nbytes)

    def expect_resizing(self, tensor: torch.Tensor) -> None:
        """Read the size of the storage of ``tensor``, which must be tracked, again before each peak from now on, as
        something resizes it without an operation.
        """
        key = tensor.untyped_storage()._cdata
        self._resizing[key] = self.held[key]

    def reassign(self, held: LiveStorage, tier: str, rows: tuple[LiveRow, ...]) -> None:
        """Assign the tracked storage ``held`` to another tier and to the owners in ``rows``. `peak` does not change."""
        nbytes = held.nbytes
        self._change_size(held, 0)
        held.tier, held.rows = tier, rows
        self._change_size(held, nbytes)

    def refresh_sizes(self) -> None:
        """Read the size of every live storage again and correct `now`, for storages that were resized without a use of
        a tensor over them. `peak` does not change.
        """
        self._reread_sizes(self.held.values())

    def reset_peaks(self) -> None:
        """Forget the peaks: the present total of each tier becomes its peak."""
        self.peak = dict(self.now)
        self.peak_places = dict.fromkeys(self.now, self._where())
        self._changed = {tier: {} for tier in self.now}

    def storages_at_peak(self, tier: str) -> list[tuple[LiveStorage, int]]:
        """Return (storage, its bytes then) for the storages that made up the peak of ``tier``; their owners are those
        known now.

        Call `refresh_sizes` first.
        """
        found = {id(held): (held, held.nbytes) for held in self.held.values() if held.tier == tier}
        found.update(self._changed.get(tier, {}))
        return [(held, nbytes) for held, nbytes in found.values() if nbytes]

    def _tier_of(self, tensor: torch.Tensor) -> str:
        """Return the tier of the memory of ``tensor``, as a key of `now`."""
        if tensor.device.type == self._kind:
            return "device"
        if tensor.device.type != "cpu":
            return tensor.device.type
        return "pinned host" if tensor.is_pinned() else "pageable host"

    def _update_size(self, held: LiveStorage, nbytes: int) -> None:
        """Set the size of ``held`` to ``nbytes``. If its tier's total is a new peak then, record the peak and its
        place, and forget which storages have changed since the peak before.
        """
        tier = held.tier
        self._change_size(held, nbytes)
        if self.now[tier] > self.peak.get(tier, 0):
            self._reread_sizes(self._resizing.values())
            if self.now[tier] > self.peak.get(tier, 0):
                self.peak[tier] = self.now[tier]
                self.peak_places[tier] = self._where()
                self._changed[tier] = {}

    def _reread_sizes(self, storages: Iterable[LiveStorage]) -> None:
        """Read the sizes of ``storages`` again and correct `now`."""
        for held in list(storages):
            storage = held.reference()
            if storage is not None and storage.nbytes() != held.nbytes:
                self._change_size(held, storage.nbytes())

    def _change_size(self, held: LiveStorage, nbytes: int) -> None:
        """Set the size of ``held`` to ``nbytes`` and correct its tier's total; at the first change since the tier's
        peak remember the size that it had then.
        """
        tier = held.tier
        self._changed.setdefault(tier, {}).setdefault(id(held), (held, held.nbytes))
        self.now[tier] = self.now.get(tier, 0) + nbytes - held.nbytes
        held.nbytes = nbytes

    def _drop_freed(self, key: int, _: object) -> None:
        """Stop tracking a storage that was freed, unless a new storage has its identity ``key``. Called by its weak
        reference.
        """
        held = self.held.get(key)
        if held is not None and held.reference() is None:
            self._change_size(held, 0)
            del self.held[key]
            self._resizing.pop(key, None)
            if not self._changed[held.tier][id(held)][1]:
                del self._changed[held.tier][id(held)]
