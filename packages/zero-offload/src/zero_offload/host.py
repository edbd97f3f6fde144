"""Shards in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._copy_streams import DeviceCopies, compute_device
from ._memory import HostBlock, nbytes_of
from .ends import HostUse
from .errors import ShardError
from .trace import Trace

__all__ = ["HostStore", "check_shard"]


class HostStore:
    """Keeps named 1-D shards in host memory of exactly their size and brings them to the compute device.

    ``device``: where `acquire` puts them, by default the current accelerator. With an accelerator the memory is pinned
    and copies run beside compute, on a stream of their own; on the CPU `acquire` returns the kept shard itself.

    Call order per shard: `put`, then any number of `prefetch` (optional), `acquire`, use, `release`; `flush` before
    anything else reads the host's copy. `borrow` and `give_back` are for work on the host. ShardError names a shard
    that is unknown. ``pin`` false keeps the memory pageable. ``trace`` records what moves.
    """

    def __init__(
        self, *, device: torch.device | str | None = None, pin: bool = True, trace: Trace | None = None
    ) -> None:
        self.device = compute_device(device)
        self._pin = pin and self.device.type != "cpu"
        self._blocks: dict[str, HostBlock] = {}
        self._shards: dict[str, torch.Tensor] = {}
        self._holders: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._copies = None if self.device.type == "cpu" else DeviceCopies(self.device, trace)

    @property
    def resident_bytes(self) -> int:
        """Host memory of all shards: the sum of their sizes, nothing else."""
        return sum(map(nbytes_of, self._shards.values()))

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Copy a new shard (1-D, any dtype) into the store, in place of one of the same name that nobody holds."""
        check_shard(name, shard)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before putting another in its place", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        nbytes = nbytes_of(shard)
        block = HostBlock(nbytes, HostUse("parameter shards", pin=self._pin, parts=((name, nbytes),)))
        self._blocks[name] = block
        self._shards[name] = block.view(0, shard.numel(), shard.dtype)
        self._shards[name].copy_(shard.detach())

    def acquire(self, name: str) -> torch.Tensor:
        """The shard on the compute device, valid until `release`; may be nested."""
        host = self._shard_named(name)
        self._holders[name] = self._holders.get(name, 0) + 1
        if self._copies is None:
            return host
        if name not in self._copies:
            self._copies.fetch(name, host)
        return self._copies.get(name)

    def release(self, name: str, *, dirty: bool) -> None:
        """The caller is done; where anyone who held the shard says ``dirty``, the last release takes it to the host."""
        host = self._shard_named(name)
        if not self._holders.get(name):
            raise ShardError(f"'{name}' was released but not acquired", tensor=name)
        self._holders[name] -= 1
        if dirty:
            self._dirty.add(name)
        if self._holders[name] or self._copies is None:
            return
        if name in self._dirty:
            self._copies.send_back(name, host)
        self._dirty.discard(name)
        self._copies.drop(name)

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """The shard in host memory, writable until it is given back; ShardError while it is acquired."""
        host = self._shard_named(name)
        if self._copies is not None:
            if self._holders.get(name):
                raise ShardError(f"'{name}' is acquired; release it before borrowing it", tensor=name)
            self._copies.forget(name)
        return host

    def give_back(self, name: str, *, dirty: bool) -> None:
        """The borrower is done: what it wrote is what is kept."""
        self._shard_named(name)

    def prefetch(self, names: Sequence[str]) -> None:
        """Start bringing shards that will be acquired soon, in this order."""
        for name in names:
            host = self._shard_named(name)
            if self._copies is not None and name not in self._copies:
                self._copies.fetch(name, host)

    def flush(self) -> None:
        """Return when everything released has reached the host."""
        if self._copies is not None:
            self._copies.flush()

    def discard(self, name: str) -> None:
        """Forget a shard that nobody holds, and free its memory."""
        self._shard_named(name)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before discarding it", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        del self._shards[name], self._blocks[name]

    def close(self) -> None:
        """Let all shards go. May be called twice."""
        if self._copies is not None:
            for name in self._shards:
                self._copies.forget(name)
        self._shards.clear()
        self._blocks.clear()
        self._holders.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def _shard_named(self, name: str) -> torch.Tensor:
        """Return a shard in host memory; raise `ShardError` by name where there is none."""
        if name not in self._shards:
            raise ShardError(f"no shard '{name}' was put into this store", tensor=name)
        return self._shards[name]


def check_shard(name: str, shard: torch.Tensor) -> None:
    """ValueError for a shard that is not flat."""
    if shard.dim() != 1:
        raise ValueError(f"'{name}': expected a shard of one dimension, got shape {tuple(shard.shape)}")
