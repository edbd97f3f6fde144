"""The seam behind which shards live on some tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Residency(Protocol):
    """Keeps named shards on a tier and brings them to the compute device in time.

    Call order per shard: `prefetch` (optional), `acquire`, use, `release`; `flush` before anything outside reads the
    tier.
    """

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Hand over a new shard (1-D, any floating dtype); the store owns it from now on."""

    def acquire(self, name: str) -> torch.Tensor:
        """The shard on the compute device, valid until `release`."""

    def release(self, name: str, *, dirty: bool) -> None:
        """The caller is done; ``dirty`` says that it wrote the shard, which must reach its tier."""

    def prefetch(self, names: Sequence[str]) -> None:
        """A hint: these shards will be acquired soon, in this order."""

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """The shard where the tier has it (host memory, or the device), for an optimizer to write; ``fresh``: all of it
        will be written and none of it read. Not while it is acquired."""

    def give_back(self, name: str, *, dirty: bool) -> None:
        """The borrower is done; ``dirty`` says that it wrote the shard."""

    def flush(self) -> None:
        """Return when everything released has reached its tier."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of shards and buffers in memory."""

    def close(self) -> None:
        """Let all shards go. May be called twice."""


class DeviceResidency:
    """The null store: shards stay on the compute device and every call is free."""

    def __init__(self) -> None:
        self._shards: dict[str, torch.Tensor] = {}

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Keep ``shard`` under ``name``."""
        self._shards[name] = shard

    def acquire(self, name: str) -> torch.Tensor:
        """Return the shard itself; KeyError names an unknown one."""
        return self._shards[name]

    def release(self, name: str, *, dirty: bool) -> None:
        """Nothing to do."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Nothing to do."""

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the shard itself."""
        return self._shards[name]

    def give_back(self, name: str, *, dirty: bool) -> None:
        """Nothing to do."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of all shards; some may be views of gathered parameters."""
        return sum(shard.nbytes for shard in self._shards.values())

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Forget all shards."""
        self._shards.clear()


class Readers:
    """Those who read shards, masters and states beside training, such as a checkpoint that is copied behind it.

    They are waited for before anything writes shards, masters or states outside of forward and backward."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def add(self, wait: Callable[[], None]) -> None:
        """``wait`` returns when a reader is done, at once when it is idle. It must not raise."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when all readers are done: now memory may change."""
        for wait in self._waits:
            wait()
