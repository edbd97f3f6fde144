"""The storages that are alive, their sizes, and their sum at its highest."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class LiveStorage:
    """A live storage: its size when it was last looked at, its kind of device, the place where it was made, and the
    kind and name of its owner, if that is known."""

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    device: str
    origin: str
    owner: tuple[str, str] | None = None


class LiveMemory:
    """Follows storages from the first tensor over them to their end, on every kind of device.

    ``where``: names the place in the run where a storage is made. ``at_peak``: called with the kind of device before
    the sum falls from a new highest value.

    A storage that is resized is looked at again when a tensor over it is used, and all are before a sum counts as the
    highest.

    Attributes:
        held: what is alive, by the identity of the storage.
        now, peak: bytes by kind of device.
        place: where the last peak was.
    """

    def __init__(self, where: Callable[[], str] = str, at_peak: Callable[[str], None] = lambda _: None) -> None:
        self._where = where
        self._at_peak = at_peak
        self.held: dict[int, LiveStorage] = {}
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.place = ""
        self._unseen: set[str] = set()

    def meet(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor's storage and of its size."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self.held.get(key)
        if held is None or held.reference() is not storage:
            reference = weakref.ref(storage, functools.partial(self._gone, key))
            held = self.held[key] = LiveStorage(reference, 0, tensor.device.type, self._where())
        nbytes = storage.nbytes()
        if nbytes != held.nbytes:
            self._update(held, nbytes)

    def look(self) -> None:
        """Look at the size of every storage."""
        for held in list(self.held.values()):
            storage = held.reference()
            if storage is not None and storage.nbytes() != held.nbytes:
                self._change(held, storage.nbytes())

    def restart(self) -> None:
        """Look for the highest sum from now on."""
        self.peak = dict(self.now)
        self._unseen.clear()

    def settle(self) -> None:
        """Report peaks that no fall has followed yet."""
        for device in sorted(self._unseen):
            self._at_peak(device)
        self._unseen.clear()

    def _update(self, held: LiveStorage, nbytes: int) -> None:
        device = held.device
        self._change(held, nbytes)
        if self.now[device] > self.peak.get(device, 0):
            self.look()
            if self.now[device] > self.peak.get(device, 0):
                self.peak[device] = self.now[device]
                self.place = self._where()
                self._unseen.add(device)

    def _change(self, held: LiveStorage, nbytes: int) -> None:
        device = held.device
        if nbytes < held.nbytes and device in self._unseen:
            self._unseen.discard(device)
            self._at_peak(device)
        self.now[device] = self.now.get(device, 0) + nbytes - held.nbytes
        held.nbytes = nbytes

    def _gone(self, key: int, _: object) -> None:
        held = self.held.get(key)
        if held is not None and held.reference() is None:
            self._change(held, 0)
            del self.held[key]
