"""Shards in files."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ._buffer_ring import BufferRing, Pack, lay_out
from ._copy_streams import DeviceCopies, compute_device
from ._extents import DTYPE_NAMES, naming, open_extents
from ._memory import nbytes_of
from ._protocols import ExtentStore, Generation, PathUse
from ._wear import wear_report
from .errors import ShardError
from .host import HostStore, check_shard
from .sealed import Sealed
from .swap_paths import NvmePath, swap_paths
from .trace import Trace

__all__ = ["NvmeStore"]


class NvmeStore:
    """Keeps named 1-D shards in files and brings them to the compute device through a ring of host buffers.

    ``path``: a folder, or several (one per device) to stripe over, by their speed or by weights (`SwapPaths`).

    Host memory holds ``buffer_count`` buffers of ``buffer_bytes`` each (a larger shard is refused; 0: each buffer grows
    to the largest shard that it carried). The first shards that fit into ``host_bytes`` stay in host memory besides and
    are never written to files. ``checksums`` are recorded as data is written, ``verify`` compares them on every read.
    ``prefix`` begins the file names: two stores in one folder need different ones. ``engine``: a
    ``zero_nvme_aio.Engine`` to share. ``pin`` false keeps host memory pageable. ``trace``, if not None, records the
    transfers.

    At most ``buffer_count`` shards are held or on their way to the device at a time. There are no locks: one thread
    calls at a time; `seal` says when it may run beside others.

    The files are removed by `close`, at garbage collection and at exit; files that a killed process left behind are
    removed when the next store opens the same path and prefix. ShardError and its subclasses name the tensor, the file
    and the offset.
    """

    def __init__(
        self,
        path: NvmePath,
        *,
        device: torch.device | str | None = None,
        buffer_count: int = 5,
        buffer_bytes: int = 0,
        host_bytes: int = 0,
        checksums: bool = True,
        verify: bool = False,
        prefix: str = "shards",
        engine: Any = None,
        pin: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.device = compute_device(device)
        self._store = open_extents(swap_paths(path), prefix=prefix, checksums=checksums, verify=verify, engine=engine)
        self._finalizer = weakref.finalize(self, _close_and_remove, self._store)
        self._ring = BufferRing(
            self._store,
            buffer_count=buffer_count,
            buffer_bytes=buffer_bytes,
            fixed=buffer_bytes > 0,
            pin=pin and self.device.type != "cpu",
            trace=trace,
            hop="shards",
        )
        self._buffer_count = buffer_count
        self._started = time.monotonic()
        self._host = HostStore(device=self.device, pin=pin, trace=trace)
        self._host_bytes = host_bytes
        self._packs: dict[str, tuple[Pack, torch.dtype]] = {}
        self._holders: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._in_host: dict[str, tuple[int, torch.dtype]] = {}
        self._copies = None if self.device.type == "cpu" else DeviceCopies(self.device, trace)
        self._generations: list[Generation] = []
        self._copying: deque[tuple[torch.Event | None, Pack]] = deque()  # buffers that copies to the device read

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of host memory held: the ring's buffers in whole pages, and the shards within
        ``host_bytes``.
        """
        return self._ring.resident_bytes + self._host.resident_bytes

    @property
    def lends_at_most(self) -> int:
        """Return how many shards can be held or borrowed at a time: the number of buffers."""
        return self._buffer_count

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of the shards that are kept in files."""
        return sum(part.nbytes for pack, _ in self._packs.values() for part in pack.parts)

    def bytes_written(self) -> int:
        """Return the bytes written to the files so far, which is what wears a drive."""
        return self._store.bytes_written()

    def bytes_written_per_day(self) -> float:
        """Return `bytes_written` at the average rate since this store was made, in bytes per day."""
        return self.bytes_written() * 86400.0 / max(time.monotonic() - self._started, 1e-9)

    def report(self, name: str) -> list[str]:
        """Return lines of text, each beginning with ``name``, on what was written to drives; an empty list if nothing
        was.
        """
        return wear_report(name, self)

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder, the bytes written and read so far, its speed and its state."""
        return self._store.path_use()

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Copy a new shard (1-D, any dtype) into the store, or replace one of the same name, size and dtype. Writing to
        the file starts, and `flush` waits for it. A shard that fits into ``host_bytes`` stays in host memory.

        ShardError for another size or dtype, and while the shard to be replaced is acquired; StoreFullError if every
        buffer is held or too small; ValueError unless it is 1-D.
        """
        check_shard(name, shard)
        if name in self._in_host or self._fits_host(name, shard):
            _require_alike(name, shard, *self._in_host.get(name, (nbytes_of(shard), shard.dtype)))
            self._host.put(name, shard)
            self._in_host[name] = nbytes_of(shard), shard.dtype
            return
        pack = lay_out(name, [(name, 0, nbytes_of(shard))])
        known, dtype = self._packs.setdefault(name, (pack, shard.dtype))
        _require_alike(name, shard, known.parts[0].nbytes, dtype)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before putting another in its place", tensor=name)
        self._store.declare(name, pack.parts[0].nbytes, DTYPE_NAMES.get(shard.dtype, "U8"))
        if self._copies is not None:
            self._copies.forget(name)
        buffer = self._acquire_buffer(pack, fresh=True)
        buffer[: nbytes_of(shard)].view(shard.dtype).copy_(shard.detach())
        self._ring.release(pack, dirty=True)

    def acquire(self, name: str) -> torch.Tensor:
        """Return the shard (1-D) on the compute device, valid until `release`; calls may nest. Waits for its file to be
        read.

        ShardError for an unknown shard or a failed transfer, StoreFullError if every buffer is held.
        """
        if name in self._in_host:
            return self._host.acquire(name)
        pack, dtype = self._filed_shard(name)
        if self._copies is None:
            shard = _shard_view(self._acquire_buffer(pack), pack, dtype)
        else:
            if name not in self._copies:
                self._start_copy_to_device(self._copies, name)
            shard = self._copies.get(name)
        self._holders[name] = self._holders.get(name, 0) + 1
        return shard

    def release(self, name: str, *, dirty: bool) -> None:
        """End one `acquire`. The last release frees the device's copy and, if any holder passed ``dirty`` (it changed
        the shard), starts writing the shard to its file. From an accelerator the changed shard is first copied to a
        buffer, for which the host waits (StoreFullError if every buffer is held). ShardError if the shard is not
        acquired.
        """
        if name in self._in_host:
            self._host.release(name, dirty=dirty)
            return
        pack, dtype = self._filed_shard(name)
        if not self._holders.get(name):
            raise ShardError(f"'{name}' was released but not acquired", tensor=name)
        self._holders[name] -= 1
        if self._copies is None:
            self._ring.release(pack, dirty=dirty)
            return
        if dirty:
            self._dirty.add(name)
        if self._holders[name]:
            return
        if name in self._dirty:
            self._copies.send_back(name, _shard_view(self._acquire_buffer(pack, fresh=True), pack, dtype))
            self._copies.settle(name)
            self._ring.release(pack, dirty=True)
        self._dirty.discard(name)
        self._copies.drop(name)

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """Return the shard (1-D) in host memory, writable until `give_back`; ShardError while it is acquired, for an
        unknown shard or a failed transfer, StoreFullError if every buffer is held.

        With ``fresh`` the file is not read: the content is arbitrary, and the borrower must write all of it.
        """
        if name in self._in_host:
            return self._host.borrow(name)
        pack, dtype = self._filed_shard(name)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before borrowing it", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        return _shard_view(self._acquire_buffer(pack, fresh=fresh), pack, dtype)

    def expect(self, names: Sequence[str]) -> None:
        """Start reading shards that will be borrowed soon, in this order, as far as buffers are free. ShardError for an
        unknown one.
        """
        self._release_arrived()
        self._ring.prefetch(self._filed_shard(name)[0] for name in names if name not in self._in_host)

    def give_back(self, name: str, *, dirty: bool) -> None:
        """End one `borrow`; with ``dirty`` start writing the shard to its file. Without, the shard must not have been
        changed. ShardError if it is not borrowed.
        """
        if name in self._in_host:
            self._host.give_back(name, dirty=dirty)
        else:
            self._ring.release(self._filed_shard(name)[0], dirty=dirty)

    def prefetch(self, names: Sequence[str]) -> None:
        """Start bringing shards that will be acquired soon to the device, in this order, as far as buffers are free.
        ShardError for an unknown one.

        Call it often: a shard that has been read from its file starts on its way to the device only in such a call.
        """
        self._host.prefetch([name for name in names if name in self._in_host])
        wanted = [name for name in names if name not in self._in_host]
        if self._copies is not None:
            self._release_arrived()
            for name in wanted:
                pack = self._filed_shard(name)[0]
                if name not in self._copies and self._ring.is_here(pack) and len(self._copying) < self._buffer_count:
                    self._start_copy_to_device(self._copies, name)
            wanted = [name for name in wanted if name not in self._copies]
        self._ring.prefetch(self._filed_shard(name)[0] for name in wanted)

    def discard(self, name: str) -> None:
        """Forget a shard, after waiting for all transfers under way, whose failure is raised; ShardError while it is
        acquired or borrowed. A later shard of the same name and size reuses its space in the files.
        """
        if name in self._in_host:
            self._host.discard(name)
            del self._in_host[name]
            return
        pack, _ = self._filed_shard(name)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before discarding it", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        for event, copied in self._copying:
            if event is not None and copied.name == name:
                event.synchronize()
        self._release_arrived()
        if self._ring.is_held(pack):
            raise ShardError(f"'{name}' is borrowed; give it back before discarding it", tensor=name)
        self._ring.flush()
        self._ring.remove(pack)
        del self._packs[name]

    def __contains__(self, name: object) -> bool:
        """Return whether a shard of this name was put into the store and not discarded."""
        return name in self._in_host or name in self._packs

    def flush(self) -> None:
        """Block until every released shard has reached its tier; raise the first write that failed. Shards that are
        held are not written.
        """
        self._host.flush()
        for event, _ in self._copying:  # a buffer that a copy reads is not written before its release
            if event is not None:
                event.synchronize()
        self._release_arrived()
        self._ring.flush()

    def carried_bytes(self) -> int:
        """Return the bytes that `seal` would copy now: data that was not written since the last seal and cannot be
        carried over by sharing blocks.
        """
        with naming("shards", "seal"):
            return self._store.carried_bytes()

    @property
    def filed(self) -> frozenset[str]:
        """Return the names of the shards that are kept in files."""
        return frozenset(self._packs)

    def seal(self, *, durable: bool = True, flush: bool = True) -> Sealed:
        """Make the files read-only and durable, so that a checkpoint can link to them; later writes go to new files.

        ``durable`` false leaves syncing to `Sealed.make_durable`. ``flush`` false skips the flush: the caller has
        called `flush` and writes nothing before this returns; then it may run on any thread, while shards are read.

        Shards that were not written since the last seal are carried over by sharing blocks where the file system can do
        that; elsewhere they stay in their files until less than half of such a file is current. Shards within
        ``host_bytes`` are listed as ``resident``. ShardError when a write failed.
        """
        if flush:
            self.flush()
        with naming("shards", "seal"):
            self._generations.append(self._store.seal(durable=durable))
        sealed = Sealed.of(self._store.extents(), self._generations, steps={}, resident=frozenset(self._in_host))
        self._generations = sealed.needed(self._generations)
        return sealed

    def close(self) -> None:
        """Wait for transfers under way and remove the files; the store must not be used then. May be called twice."""
        self._finalizer()

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fits_host(self, name: str, shard: torch.Tensor) -> bool:
        """Return whether a new shard still fits into ``host_bytes``; False for one that is in files already."""
        return name not in self._packs and self._host.resident_bytes + nbytes_of(shard) <= self._host_bytes

    def _start_copy_to_device(self, copies: DeviceCopies, name: str) -> None:
        """Read a shard into a buffer and start copying it to the device; the buffer stays held until `_release_arrived`
        finds that the copy has ended.
        """
        pack, dtype = self._packs[name]
        event = copies.fetch(name, _shard_view(self._acquire_buffer(pack), pack, dtype))
        self._copying.append((event, pack))

    def _acquire_buffer(self, pack: Pack, *, fresh: bool = False) -> torch.Tensor:
        """Return the bytes (1-D, uint8) of ``pack`` in a buffer, valid until the ring's `release`; they are read from
        the files unless ``fresh``. If copies to the device hold every buffer, wait for the oldest one first.
        """
        self._release_arrived()
        if len(self._copying) == self._buffer_count:
            event, _ = self._copying[0]
            if event is not None:
                event.synchronize()
            self._release_arrived()
        return self._ring.acquire(pack, fresh=fresh)

    def _release_arrived(self) -> None:
        """Release the buffers whose copies to the device have ended; never blocks."""
        while self._copying and (self._copying[0][0] is None or self._copying[0][0].query()):
            self._ring.release(self._copying.popleft()[1], dirty=False)

    def _filed_shard(self, name: str) -> tuple[Pack, torch.dtype]:
        """Return the pack (the bytes that a buffer holds of it) and the dtype of a shard in files; ShardError if there
        is none of this name.
        """
        if name not in self._packs:
            raise ShardError(f"no shard '{name}' was put into this store", tensor=name)
        return self._packs[name]


def _shard_view(buffer: torch.Tensor, pack: Pack, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes of a ``buffer`` (uint8) that belong to the one shard in ``pack``, as a 1-D view of ``dtype``."""
    return buffer[: pack.parts[0].nbytes].view(dtype)


def _require_alike(name: str, shard: torch.Tensor, nbytes: int, dtype: torch.dtype) -> None:
    """Raise ShardError unless a new shard has the ``nbytes`` and ``dtype`` with which the shard of this name was put
    before.
    """
    if (nbytes_of(shard), shard.dtype) != (nbytes, dtype):
        raise ShardError(
            f"'{name}' was put with {nbytes} bytes of {dtype}, got {nbytes_of(shard)} bytes of {shard.dtype}",
            tensor=name,
        )


def _close_and_remove(store: ExtentStore) -> None:
    """Close the store and delete its files."""
    store.close(remove=True)
