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
    """Keeps named 1-D shards in host memory of exactly their size and copies them to the compute device.

    ``device``: the device on which `acquire` returns shards, by default the current accelerator. With an accelerator
    the memory is pinned and copies run beside compute, on a stream of their own; on the CPU `acquire` returns the kept
    shard itself.

    Call order per shard: `put`, then any number of `prefetch` (optional), `acquire`, use, `release`; `flush` before
    anything else reads the host's copy. `borrow` and `give_back` are for work on the host. An unknown name raises
    ShardError. ``pin`` false keeps the memory pageable. ``keep_memory``: `discard` keeps pinned memory for the next
    shard of that name, as pinning takes long; else, and for a shard of another size, it is freed. ``trace`` records the
    copies. There are no locks: one thread calls at a time.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        pin: bool = True,
        keep_memory: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.device = compute_device(device)
        self._pin = pin and self.device.type != "cpu"
        self._keep_memory = keep_memory and self._pin
        self._blocks: dict[str, HostBlock] = {}
        self._shards: dict[str, torch.Tensor] = {}
        self._holders: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._copies = None if self.device.type == "cpu" else DeviceCopies(self.device, trace)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of host memory that are held: the sum of the shards' sizes, without overhead, and what
        ``keep_memory`` has kept of discarded ones.
        """
        return sum(block.nbytes for block in self._blocks.values())

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Copy a new shard (1-D, any dtype) into the store; it replaces one of the same name, which may have another
        size. ShardError while that one is acquired, ValueError unless it is 1-D.
        """
        check_shard(name, shard)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before putting another in its place", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        nbytes = nbytes_of(shard)
        block = self._blocks.pop(name, None) if self._keep_memory else None
        if block is None or block.nbytes != nbytes:
            block = HostBlock(nbytes, HostUse("parameter shards", pin=self._pin, parts=((name, nbytes),)))
        self._blocks[name] = block
        self._shards[name] = block.view(0, shard.numel(), shard.dtype)
        self._shards[name].copy_(shard.detach())

    def acquire(self, name: str) -> torch.Tensor:
        """Return the shard (1-D) on the compute device, valid until `release`; calls may nest. It is ready for work
        that is queued on the current stream; the host waits only if a copy of the shard back to the host is still under
        way.
        """
        host = self._shard_named(name)
        self._holders[name] = self._holders.get(name, 0) + 1
        if self._copies is None:
            return host
        if name not in self._copies:
            self._copies.fetch(name, host)
        return self._copies.get(name)

    def release(self, name: str, *, dirty: bool) -> None:
        """End one `acquire`. The last release starts copying the shard back to the host if any holder passed ``dirty``
        (it changed the shard), and frees the device's copy. ShardError if the shard is not acquired.
        """
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
        """Return the shard (1-D) in host memory, writable until `give_back`, once a copy from the device has arrived.
        ShardError while it is acquired on an accelerator. ``fresh`` makes no difference; `NvmeStore` has the same
        argument.
        """
        host = self._shard_named(name)
        if self._copies is not None:
            if self._holders.get(name):
                raise ShardError(f"'{name}' is acquired; release it before borrowing it", tensor=name)
            self._copies.forget(name)
        return host

    def give_back(self, name: str, *, dirty: bool) -> None:
        """End one `borrow`. Nothing is copied, as the borrower changed the shard in place; ``dirty`` is ignored."""
        self._shard_named(name)

    def prefetch(self, names: Sequence[str]) -> None:
        """Start copying these shards to the device, in this order, before they are acquired; do nothing on the CPU, and
        for shards whose copy is there. ShardError for an unknown one. Waits as `acquire` does.
        """
        for name in names:
            host = self._shard_named(name)
            if self._copies is not None and name not in self._copies:
                self._copies.fetch(name, host)

    def flush(self) -> None:
        """Block until every released shard has arrived in host memory."""
        if self._copies is not None:
            self._copies.flush()

    def discard(self, name: str) -> None:
        """Forget a shard and free its memory, or keep the memory for the next shard of that name (``keep_memory``).
        ShardError while the shard is acquired or if it is unknown.
        """
        self._shard_named(name)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before discarding it", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        del self._shards[name]
        if not self._keep_memory:
            del self._blocks[name]

    def close(self) -> None:
        """Forget all shards and free their memory. May be called twice."""
        if self._copies is not None:
            for name in self._shards:
                self._copies.forget(name)
        self._shards.clear()
        self._blocks.clear()
        self._holders.clear()

    def __contains__(self, name: object) -> bool:
        """Return whether a shard of this name was put into the store and not discarded."""
        return name in self._shards

    def _shard_named(self, name: str) -> torch.Tensor:
        """Return a shard (1-D) in host memory; ShardError if there is none of this name."""
        if name not in self._shards:
            raise ShardError(f"no shard '{name}' was put into this store", tensor=name)
        return self._shards[name]


def check_shard(name: str, shard: torch.Tensor) -> None:
    """Raise ValueError if a shard is not 1-D."""
    if shard.dim() != 1:
        raise ValueError(f"'{name}': expected a shard of one dimension, got shape {tuple(shard.shape)}")
