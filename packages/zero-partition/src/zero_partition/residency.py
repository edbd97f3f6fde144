"""The interface of stores, which keep shards on some tier; the store for shards on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Residency(Protocol):
    """Keeps named shards on a tier and makes them available on the compute device in time.

    Call order per shard: `prefetch` (optional), `acquire`, use, `release`; `flush` before anything outside reads the
    tier. Names are those that `put` was given.
    """

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Store a new shard (1-D, any floating dtype) under ``name``; the store owns the tensor from now on."""

    def acquire(self, name: str) -> torch.Tensor:
        """Return the shard on the compute device, valid until `release`; waits until it is there."""

    def release(self, name: str, *, dirty: bool) -> None:
        """End an `acquire`; ``dirty``: the caller wrote the shard, and the store has to write it to its tier."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Start loading the shards ``names``, which will be acquired soon and in this order; a hint that a store may
        ignore."""

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the shard in the tier's own memory (host, or the device) for an optimizer to write, valid until
        `give_back`.

        ``fresh``: all of it will be written and none of it read. Not allowed while the shard is acquired.
        """

    def give_back(self, name: str, *, dirty: bool) -> None:
        """End a `borrow`; ``dirty``: the caller wrote the shard, and the store has to write it to its tier."""

    def flush(self) -> None:
        """Wait until every shard that was released or given back dirty has reached its tier."""

    @property
    def resident_bytes(self) -> int:
        """The bytes of shards and buffers that the store holds in memory now."""

    def close(self) -> None:
        """Free all shards. May be called more than once."""


class DeviceResidency:
    """The null `Residency`: shards stay on the compute device, and no call copies anything or waits."""

    def __init__(self) -> None:
        self._shards: dict[str, torch.Tensor] = {}

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Keep ``shard`` itself under ``name``, in place of an earlier one."""
        self._shards[name] = shard

    def acquire(self, name: str) -> torch.Tensor:
        """Return the stored tensor itself. Raises KeyError for an unknown name."""
        return self._shards[name]

    def release(self, name: str, *, dirty: bool) -> None:
        """Do nothing, as the shard stays where it is."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Do nothing, as the shards are on the device."""

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the stored tensor itself. Raises KeyError for an unknown name."""
        return self._shards[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Do nothing, as the shard stays where it is."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of all shards, including those whose memory is part of a gathered unit's."""
        return sum(shard.nbytes for shard in self._shards.values())

    def flush(self) -> None:
        """Do nothing, as nothing is written elsewhere."""

    def close(self) -> None:
        """Drop the references to all shards."""
        self._shards.clear()


class Readers:
    """Background readers of shards, masters and states, such as a checkpoint that is copied during training.

    Code that writes shards, masters or states outside forward and backward first waits for the readers, by `wait`.
    """

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def add(self, wait: Callable[[], None]) -> None:
        """Register a reader for good: ``wait`` blocks until it has finished, returns at once if it is idle, and never
        raises."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Wait until all readers have finished, so that the memory may be written until another one begins."""
        for wait in self._waits:
            wait()
