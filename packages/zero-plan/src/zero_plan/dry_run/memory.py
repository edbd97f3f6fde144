"""The storages that are alive, their sizes, and their sum at its highest."""

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
    """A live storage: its size when it was last looked at, its tier, the place where it was made, the kind and name of
    its owner, if that is known, and the rows of a block of host memory with several owners."""

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    tier: str
    origin: str
    owner: tuple[str, str] | None = None
    rows: tuple[LiveRow, ...] = ()


class LiveMemory:
    """Follows storages from the first tensor over them to their end, on every tier.

    ``kind``: the kind of device that computes. ``where``: the phase and the place of the run that a storage is
    made in. ``at_peak``: called with the tier before the sum falls from a new highest value.

    A storage that is resized is looked at again when a tensor over it is used, and all are before a sum counts as the
    highest.

    Attributes:
        held: what is alive, by the identity of the storage.
        now, peak: bytes by tier: "device", "pinned host", "pageable host", or a kind of device that does not compute.
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
        self._unseen: set[str] = set()
        self._taking: tuple[str, tuple[LiveRow, ...]] | None = None

    @contextmanager
    def taking(self, tier: str, rows: tuple[LiveRow, ...]) -> Iterator[None]:
        """Have storages that are first met inside count to a tier and belong to the owners in ``rows``."""
        self._taking = tier, rows
        try:
            yield
        finally:
            self._taking = None

    def meet(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor's storage and of its size."""
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
        """Have a storage count to another tier, and belong to the owners in ``rows``."""
        nbytes = held.nbytes
        self._change(held, 0)
        held.tier, held.rows = tier, rows
        self._change(held, nbytes)

    def look(self) -> None:
        """Look at the size of every storage."""
        for held in list(self.held.values()):
            storage = held.reference()
            if storage is not None and storage.nbytes() != held.nbytes:
                self._change(held, storage.nbytes())

    def restart(self) -> None:
        """Look for the highest sums from now on; what is alive now is the first."""
        self.peak = dict(self.now)
        self.moments = dict.fromkeys(self.now, self._where())
        self._unseen = {tier for tier, nbytes in self.now.items() if nbytes}

    def settle(self) -> None:
        """Report peaks that no fall has followed yet."""
        for tier in sorted(self._unseen):
            self._at_peak(tier)
        self._unseen.clear()

    def _tier(self, tensor: torch.Tensor) -> str:
        if tensor.device.type == self._kind:
            return "device"
        if tensor.device.type != "cpu":
            return tensor.device.type
        return "pinned host" if tensor.is_pinned() else "pageable host"

    def _update(self, held: LiveStorage, nbytes: int) -> None:
        tier = held.tier
        self._change(held, nbytes)
        if self.now[tier] > self.peak.get(tier, 0):
            self.look()
            if self.now[tier] > self.peak.get(tier, 0):
                self.peak[tier] = self.now[tier]
                self.moments[tier] = self._where()
                self._unseen.add(tier)

    def _change(self, held: LiveStorage, nbytes: int) -> None:
        tier = held.tier
        if nbytes < held.nbytes and tier in self._unseen:
            self._unseen.discard(tier)
            self._at_peak(tier)
        self.now[tier] = self.now.get(tier, 0) + nbytes - held.nbytes
        held.nbytes = nbytes

    def _gone(self, key: int, _: object) -> None:
        held = self.held.get(key)
        if held is not None and held.reference() is None:
            self._change(held, 0)
            del self.held[key]
