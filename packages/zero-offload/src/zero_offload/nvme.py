"""Shards in files."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ._buffer_ring import BufferContent, BufferRing, lay_out
from ._copy_streams import DeviceCopies, compute_device
from ._extents import DTYPE_NAMES, NvmePath, folders, naming, open_extents
from ._memory import nbytes_of
from ._protocols import ExtentStore, Generation
from .errors import ShardError
from .host import HostStore, check_shard
from .sealed import Sealed
from .trace import Trace

__all__ = ["NvmeStore"]


class NvmeStore:
    """Keeps named 1-D shards in files and brings them to the compute device through a ring of host buffers.

    ``path``: a folder, or several (one per device) to stripe over. ``buffer_count`` buffers are all the host memory
    that it takes, of ``buffer_bytes`` each (a larger shard is refused), or where that is 0 as large as the shards they
    carried; and besides them the first shards that fit ``host_bytes``, which stay in host memory and are never written.
    ``checksums`` are recorded as data is written, ``verify`` compares them on every read. ``prefix`` begins the file
    names: two stores in one folder need different ones. ``engine``: a ``zero_nvme_aio.Engine`` to share. ``pin`` and
    ``trace`` are those of `HostStore`.

    At most ``buffer_count`` shards are held or on their way to the device at a time.

    The files are swept by `close`, at garbage collection and at exit; those of a killed process go when the next store
    opens the same path and prefix. ShardError and its kinds name the tensor, the file and the offset.
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
        self._store = open_extents(folders(path), prefix=prefix, checksums=checksums, verify=verify, engine=engine)
        self._finalizer = weakref.finalize(self, _sweep, self._store)
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
        self._packs: dict[str, tuple[BufferContent, torch.dtype]] = {}
        self._holders: dict[str, int] = {}
        self._dirty: set[str] = set()
        self._in_host: set[str] = set()
        self._copies = None if self.device.type == "cpu" else DeviceCopies(self.device, trace)
        self._generations: list[Generation] = []
        self._travelling: deque[tuple[torch.Event | None, BufferContent]] = (
            deque()
        )  # buffers that copies to the device read

    @property
    def resident_bytes(self) -> int:
        """Host memory held: the ring's buffers in whole pages, and the shards within ``host_bytes``."""
        return self._ring.resident_bytes + self._host.resident_bytes

    @property
    def lends_at_most(self) -> int:
        """Shards that can be held or borrowed together."""
        return self._buffer_count

    @property
    def stored_bytes(self) -> int:
        """Bytes of the shards that live in files."""
        return sum(part.nbytes for pack, _ in self._packs.values() for part in pack.parts)

    def bytes_written(self) -> int:
        """Bytes written to the files so far: what wears a drive."""
        return self._store.bytes_written()

    def bytes_written_per_day(self) -> float:
        """`bytes_written` at the pace since this store was made, in bytes per day."""
        return self.bytes_written() * 86400.0 / max(time.monotonic() - self._started, 1e-9)

    def put(self, name: str, shard: torch.Tensor) -> None:
        """Take a new shard (1-D, any dtype), in place of one of the same name, size and dtype that nobody holds."""
        check_shard(name, shard)
        if name in self._in_host or self._fits_host(name, shard):
            self._host.put(name, shard)
            self._in_host.add(name)
            return
        pack = lay_out(name, [(name, 0, nbytes_of(shard))])
        if self._packs.setdefault(name, (pack, shard.dtype)) != (pack, shard.dtype):
            known, dtype = self._packs[name]
            raise ShardError(
                f"'{name}' was put with {known.parts[0].nbytes} bytes of {dtype}, "
                f"got {nbytes_of(shard)} bytes of {shard.dtype}",
                tensor=name,
            )
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before putting another in its place", tensor=name)
        self._store.declare(name, pack.parts[0].nbytes, DTYPE_NAMES.get(shard.dtype, "U8"))
        if self._copies is not None:
            self._copies.forget(name)
        buffer = self._take(pack, fresh=True)
        buffer[: nbytes_of(shard)].view(shard.dtype).copy_(shard.detach())
        self._ring.release(pack, dirty=True)

    def acquire(self, name: str) -> torch.Tensor:
        """The shard on the compute device, valid until `release`; may be nested."""
        if name in self._in_host:
            return self._host.acquire(name)
        pack, dtype = self._known(name)
        if self._copies is None:
            shard = _typed(self._take(pack), pack, dtype)
        else:
            if name not in self._copies:
                self._to_device(self._copies, name)
            shard = self._copies.get(name)
        self._holders[name] = self._holders.get(name, 0) + 1
        return shard

    def release(self, name: str, *, dirty: bool) -> None:
        """The caller is done; where anyone who held the shard says ``dirty``, the last release starts writing it."""
        if name in self._in_host:
            self._host.release(name, dirty=dirty)
            return
        pack, dtype = self._known(name)
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
            self._copies.send_back(name, _typed(self._take(pack, fresh=True), pack, dtype))
            self._copies.settle(name)
            self._ring.release(pack, dirty=True)
        self._dirty.discard(name)
        self._copies.drop(name)

    def borrow(self, name: str, *, fresh: bool = False) -> torch.Tensor:
        """The shard in host memory, writable until it is given back; ShardError while it is acquired.

        With ``fresh`` it is not read: its content is arbitrary, and all of it is to be written.
        """
        if name in self._in_host:
            return self._host.borrow(name)
        pack, dtype = self._known(name)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before borrowing it", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        return _typed(self._take(pack, fresh=fresh), pack, dtype)

    def expect(self, names: Sequence[str]) -> None:
        """Start reading shards that will be borrowed soon, in this order, as far as buffers are free."""
        self._arrived()
        self._ring.prefetch(self._known(name)[0] for name in names if name not in self._in_host)

    def give_back(self, name: str, *, dirty: bool) -> None:
        """The borrower is done; with ``dirty`` the shard is written to its file."""
        if name in self._in_host:
            self._host.give_back(name, dirty=dirty)
        else:
            self._ring.release(self._known(name)[0], dirty=dirty)

    def prefetch(self, names: Sequence[str]) -> None:
        """Start bringing shards that will be acquired soon, in this order, as far as buffers are free.

        Call it often: a shard whose reading has ended goes on to the device only then.
        """
        self._host.prefetch([name for name in names if name in self._in_host])
        wanted = [name for name in names if name not in self._in_host]
        if self._copies is not None:
            self._arrived()
            for name in wanted:
                pack = self._known(name)[0]
                if name not in self._copies and self._ring.is_here(pack) and len(self._travelling) < self._buffer_count:
                    self._to_device(self._copies, name)
            wanted = [name for name in wanted if name not in self._copies]
        self._ring.prefetch(self._known(name)[0] for name in wanted)

    def discard(self, name: str) -> None:
        """Forget a shard that nobody holds. A shard of the same name and size uses its place in the files again."""
        if name in self._in_host:
            self._host.discard(name)
            self._in_host.discard(name)
            return
        pack, _ = self._known(name)
        if self._holders.get(name):
            raise ShardError(f"'{name}' is acquired; release it before discarding it", tensor=name)
        if self._copies is not None:
            self._copies.forget(name)
        self._arrived()
        self._ring.flush()
        self._ring.remove(pack)
        del self._packs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._in_host or name in self._packs

    def flush(self) -> None:
        """Return when everything released has reached its tier; raise the first write that failed."""
        self._host.flush()
        self._ring.flush()

    def carried_bytes(self) -> int:
        """Bytes that `seal` would copy if it were called now, of shards not written since the last one."""
        with naming("shards", "seal"):
            return self._store.carried_bytes()

    @property
    def filed(self) -> frozenset[str]:
        """The shards that are in files."""
        return frozenset(self._packs)

    def seal(self, *, durable: bool = True, flush: bool = True) -> Sealed:
        """Make the files read-only and durable, for a checkpoint to link to; later writes go to new ones. Without
        ``durable`` what waits for the device is left to `Sealed.make_durable`. Without ``flush``, after `flush` and
        before anything is written, on any thread, while shards are read.

        Shards that were not written since the last one are taken along by sharing blocks where the file system can;
        elsewhere they stay in the files they are in, until less than half of those is current. Shards within
        ``host_bytes`` are ``resident``. ShardError when a write failed.
        """
        if flush:
            self.flush()
        with naming("shards", "seal"):
            self._generations.append(self._store.seal(durable=durable))
        sealed = Sealed.of(self._store.extents(), self._generations, steps={}, resident=frozenset(self._in_host))
        self._generations = sealed.needed(self._generations)
        return sealed

    def close(self) -> None:
        """Wait for what is under way and remove the files. May be called twice."""
        self._finalizer()

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fits_host(self, name: str, shard: torch.Tensor) -> bool:
        return name not in self._packs and self._host.resident_bytes + nbytes_of(shard) <= self._host_bytes

    def _to_device(self, copies: DeviceCopies, name: str) -> None:
        """Start copying a shard from its buffer, which is held until the copy has ended."""
        pack, dtype = self._packs[name]
        event = copies.fetch(name, _typed(self._take(pack), pack, dtype))
        self._travelling.append((event, pack))

    def _take(self, pack: BufferContent, *, fresh: bool = False) -> torch.Tensor:
        """A pack in a buffer; where copies to the device hold all of them, the oldest is waited for."""
        self._arrived()
        if len(self._travelling) == self._buffer_count:
            event, _ = self._travelling[0]
            if event is not None:
                event.synchronize()
            self._arrived()
        return self._ring.acquire(pack, fresh=fresh)

    def _arrived(self) -> None:
        """Give back the buffers of copies that have ended."""
        while self._travelling and (self._travelling[0][0] is None or self._travelling[0][0].query()):
            self._ring.release(self._travelling.popleft()[1], dirty=False)

    def _known(self, name: str) -> tuple[BufferContent, torch.dtype]:
        if name not in self._packs:
            raise ShardError(f"no shard '{name}' was put into this store", tensor=name)
        return self._packs[name]


def _typed(buffer: torch.Tensor, pack: BufferContent, dtype: torch.dtype) -> torch.Tensor:
    return buffer[: pack.parts[0].nbytes].view(dtype)


def _sweep(store: ExtentStore) -> None:
    store.close(remove=True)
