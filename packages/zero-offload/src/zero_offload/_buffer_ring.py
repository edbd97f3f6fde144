"""A ring of host buffers in front of an extent store: reads run ahead, writes trail behind, the middle computes.

An extent is a named range of bytes in the store's files. A pack is what one buffer holds: parts of extents that are
read and written together. A pack is held from `acquire` to `release`. A buffer is awaited while its pack was prefetched
and has not been acquired yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field

import torch

from ._extents import aligned_buffer, naming
from ._memory import PAGE, page_rounded
from ._protocols import ExtentStore, Request
from .ends import HostUse
from .errors import ShardError, StoreFullError
from .trace import Trace

__all__ = ["Pack", "BufferRing", "BufferedExtent", "lay_out"]

_PATIENCE = 8  # a hint is forgotten when every buffer was used this often without it


@dataclass(frozen=True)
class BufferedExtent:
    """``nbytes`` at ``extent_offset`` of the extent ``name``, kept at ``buffer_offset`` of a buffer."""

    name: str
    extent_offset: int
    nbytes: int
    buffer_offset: int


@dataclass(frozen=True)
class Pack:
    """The parts of extents that one buffer of at least ``nbytes`` holds, which are read and written together."""

    name: str
    parts: tuple[BufferedExtent, ...]
    nbytes: int


def lay_out(name: str, pieces: Iterable[tuple[str, int, int]]) -> Pack:
    """Return a pack called ``name`` of these pieces, (extent name, offset in the extent, bytes), one after the other.
    Each has the same distance to a page boundary in memory as in its extent, so that direct I/O needs no copy.
    """
    parts: list[BufferedExtent] = []
    position = 0
    for extent, offset, nbytes in pieces:
        shift = offset % PAGE
        parts.append(BufferedExtent(extent, offset, nbytes, position + shift))
        position += page_rounded(shift + nbytes)
    return Pack(name, tuple(parts), position)


@dataclass
class _Slot:
    """One buffer of the ring: free (no pack), idle (a pack that nobody holds) or held. ``dirty``: a holder changed the
    pack. ``writing``: the transfers in ``pending`` are writes, else reads. ``used`` and ``hinted`` are times, counted
    in calls of the ring's `acquire`.
    """

    memory: torch.Tensor
    pack: Pack | None = None
    holders: int = 0
    dirty: bool = False
    writing: bool = False
    used: int = 0  # when it was last acquired; 0 while it was only prefetched
    hinted: int = 0  # when it was last prefetched
    pending: list[tuple[BufferedExtent, Request]] = field(default_factory=list)

    def transfers_done(self) -> bool:
        """Return whether all transfers of the buffer have ended, successfully or not; never blocks."""
        return all(request.done() for _, request in self.pending)


class BufferRing:
    """``buffer_count`` buffers in front of ``store``, each of at least ``buffer_bytes``, and grown to the largest pack
    it has held.

    A pack stays in its buffer until the buffer is needed, so that nothing is read again while all packs fit; packs are
    known by their names. With ``fixed`` a pack larger than a buffer is refused. ``pin`` registers the buffers with an
    accelerator. ``hop`` names the kind of transfer: ``trace``, if not None, gets "<hop> in" and "<hop> out". Not
    thread-safe. ValueError for a ``buffer_count`` below 1.
    """

    def __init__(
        self,
        store: ExtentStore,
        *,
        buffer_count: int,
        buffer_bytes: int = 0,
        fixed: bool = False,
        pin: bool = False,
        trace: Trace | None = None,
        hop: str = "",
    ) -> None:
        if buffer_count < 1:
            raise ValueError(f"buffer_count: expected 1 or more, got {buffer_count}")
        self._store = store
        self._trace = trace
        self._hop = hop
        self._fixed = fixed
        self._pin = pin
        self._slots = [_Slot(self._new_buffer(buffer_bytes)) for _ in range(buffer_count)]
        self._clock = 0

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of host memory of all buffers, in whole pages."""
        return sum(page_rounded(slot.memory.numel()) for slot in self._slots)

    def prefetch(self, packs: Iterable[Pack]) -> None:
        """Start reading packs, in this order, into buffers that can be taken without waiting; stop when there is none.
        A pack that is in a buffer already is kept there for its expected use. ShardError if a read cannot be started.
        """
        for pack in packs:
            known = self._slot_of(pack)
            if known is not None:
                if not known.holders:
                    self._mark_prefetched(known)
                continue
            slot = self._take_free()
            if slot is None:
                return
            self._start_read(slot, pack)
            self._mark_prefetched(slot)

    def is_here(self, pack: Pack) -> bool:
        """Return whether a pack is in a buffer and no transfer of it is under way, so that `acquire` would not wait."""
        slot = self._slot_of(pack)
        return slot is not None and slot.transfers_done()

    def is_held(self, pack: Pack) -> bool:
        """Return whether a pack is acquired and not yet released."""
        slot = self._slot_of(pack)
        return slot is not None and slot.holders > 0

    def acquire(self, pack: Pack, *, fresh: bool = False) -> torch.Tensor:
        """Return the pack's bytes (1-D, uint8) in a buffer, writable until `release`; calls may nest. With ``fresh``
        the bytes are not read, and their content is arbitrary, unless the pack is in a buffer already.

        Waits for transfers of the buffer. Raises ShardError for a failed one, StoreFullError when every buffer is held,
        or when the pack is larger than a buffer of fixed size.
        """
        slot = self._slot_of(pack)
        if slot is None:
            slot = self._take_or_evict()
            if fresh:
                self._ensure_size(slot, pack)
                slot.pack = pack
            else:
                self._start_read(slot, pack)
        self._settle(slot)
        slot.holders += 1
        self._mark_used(slot)
        return slot.memory[: pack.nbytes]

    def release(self, pack: Pack, *, dirty: bool) -> None:
        """End one `acquire`. The last release starts writing the pack if any holder passed ``dirty``, which means that
        the holder changed the bytes. ShardError if the pack is not acquired or a write cannot be started.
        """
        slot = self._slot_of(pack)
        if slot is None or slot.holders == 0:
            raise ShardError(f"'{pack.name}' was released but not acquired", tensor=pack.name)
        slot.holders -= 1
        slot.dirty |= dirty
        if slot.dirty and slot.holders == 0:
            self._start_write(slot, pack)

    def drop(self, pack: Pack) -> None:
        """End one `acquire` by a holder that changed nothing and, if there is no other holder, forget the buffer's
        content, because the extents are about to change.
        """
        self.release(pack, dirty=False)
        self.remove(pack)

    def remove(self, pack: Pack) -> None:
        """Forget the buffered content of a pack without holders; do nothing if it is held or in no buffer. None of its
        transfers may be under way.
        """
        slot = self._slot_of(pack)
        if slot is not None and not slot.holders:
            slot.pack = None

    def discard(self, pack: Pack) -> None:
        """End all holds on a pack and throw away its buffered content unwritten; do nothing if it is in no buffer. The
        buffer gets new memory, so tensors that `acquire` returned stay valid but belong to the ring no longer.
        """
        slot = self._slot_of(pack)
        if slot is not None:
            self._abandon(slot)

    def forget(self) -> None:
        """Empty every buffer, after waiting for its transfers and ignoring their failures; all holds end. Changes whose
        writing had not begun are lost, so the caller must write all data again.
        """
        for slot in self._slots:
            with suppress(ShardError):
                self._settle(slot)
            slot.pack, slot.holders, slot.dirty = None, 0, False

    def flush(self) -> None:
        """Block until every transfer has ended, then raise the first failure as ShardError. Packs that are held are not
        written.
        """
        with ExitStack() as stack:
            for slot in self._slots:
                stack.callback(self._settle, slot)

    def _slot_of(self, pack: Pack) -> _Slot | None:
        """Return the buffer that has a pack; None if none has it."""
        return next((slot for slot in self._slots if slot.pack is not None and slot.pack.name == pack.name), None)

    def _take_free(self) -> _Slot | None:
        """Return an empty buffer that can be had without waiting: one without a pack, else the least recently used one
        that is neither held nor awaited nor in transfer, whose pack is dropped; None if there is none. Raises the
        ShardError of its last transfers.
        """
        idle = [
            slot
            for slot in self._slots
            if slot.pack is None or (not slot.holders and not self._is_awaited(slot) and slot.transfers_done())
        ]
        slot = min(idle, key=lambda slot: (slot.pack is not None, slot.used), default=None)
        if slot is not None:
            self._settle(slot)
            slot.pack = None
        return slot

    def _take_or_evict(self) -> _Slot:
        """Return an empty buffer for a pack that is needed now: a free one as of `_take_free`, else the least recently
        used that is not held nor awaited, else the last awaited one; wait for its transfers. StoreFullError if all are
        held.
        """
        slot = self._take_free()
        if slot is not None:
            return slot
        idle = [slot for slot in self._slots if not slot.holders]
        if not idle:
            held = ", ".join(f"'{slot.pack.name}'" for slot in self._slots if slot.pack is not None)
            raise StoreFullError(f"all {len(self._slots)} buffers are held ({held}); release one or raise buffer_count")
        used = [slot for slot in idle if not self._is_awaited(slot)]
        slot = min(used, key=lambda slot: slot.used) if used else idle[-1]
        self._settle(slot)
        slot.pack = None
        return slot

    def _start_read(self, slot: _Slot, pack: Pack) -> None:
        """Start reading a pack into a buffer, which is grown if it is too small. If a read cannot be started, the
        buffer is emptied and the ShardError raised.
        """
        self._ensure_size(slot, pack)
        slot.pack = pack
        slot.writing = False
        try:
            for part in pack.parts:
                with naming(part.name, "read"):
                    request = self._store.read(part.name, self._memory_of(slot, part), part.extent_offset)
                self._trace_transfer("in", part, request)
                slot.pending.append((part, request))
        except BaseException:
            self._abandon(slot)
            raise

    def _start_write(self, slot: _Slot, pack: Pack) -> None:
        """Start writing a buffer's pack to its extents. If a write cannot be started, the buffer is emptied and the
        ShardError raised.
        """
        slot.writing, slot.dirty = True, False
        try:
            for part in pack.parts:
                with naming(part.name, "write"):
                    request = self._store.write(part.name, self._memory_of(slot, part), part.extent_offset)
                self._trace_transfer("out", part, request)
                slot.pending.append((part, request))
        except BaseException:
            self._abandon(slot)
            raise

    def _settle(self, slot: _Slot) -> None:
        """Wait for a buffer's transfers. If one failed, empty the buffer, whose content then differs from the store's,
        and raise ShardError.
        """
        try:
            with self._trace_wait(slot):
                while slot.pending:
                    part, request = slot.pending[-1]
                    with naming(part.name, "write" if slot.writing else "read"):
                        request.wait()
                    slot.pending.pop()
        except BaseException:
            self._abandon(slot)
            raise
        slot.writing = False

    def _trace_transfer(self, way: str, part: BufferedExtent, request: Request) -> None:
        """Record the transfer of a part until it ends, if there is a trace; ``way`` is "in" or "out"."""
        if self._trace is not None:
            self._trace.follow(f"{self._hop} {way}", part.name, part.nbytes, request.wait)

    def _trace_wait(self, slot: _Slot) -> AbstractContextManager[None]:
        """Return a context manager that records the wait for a buffer's transfers; one that does nothing if there is no
        trace or nothing to wait for.
        """
        if self._trace is None or slot.pack is None or slot.transfers_done():
            return nullcontext()
        return self._trace.span(f"{self._hop} {'out' if slot.writing else 'in'}", slot.pack.name, waiting=True)

    def _abandon(self, slot: _Slot) -> None:
        """Empty a buffer, which ends all holds on its pack, and give it new memory, since transfers under way may still
        use the old one.
        """
        nbytes = slot.memory.numel()
        slot.pack, slot.holders, slot.dirty, slot.writing, slot.used = None, 0, False, False, 0
        slot.pending.clear()
        slot.memory = self._new_buffer(nbytes)

    def _ensure_size(self, slot: _Slot, pack: Pack) -> None:
        """Give a buffer new memory if it is too small for a pack; its content is lost then. StoreFullError if the
        buffers have a fixed size.
        """
        if slot.memory.numel() >= pack.nbytes:
            return
        if self._fixed:
            raise StoreFullError(
                f"'{pack.name}' needs a buffer of {pack.nbytes} bytes, those of this store have {slot.memory.numel()}; "
                "raise buffer_bytes (buffer_size in a configuration), or leave it out",
                tensor=pack.name,
            )
        slot.memory = self._new_buffer(pack.nbytes)

    def _new_buffer(self, nbytes: int) -> torch.Tensor:
        """Return new host memory of ``nbytes`` in whole pages, aligned for direct I/O."""
        return aligned_buffer(page_rounded(nbytes), HostUse(f"buffers of {self._hop}", pin=self._pin))

    def _memory_of(self, slot: _Slot, part: BufferedExtent) -> torch.Tensor:
        """Return the bytes (1-D, uint8) of a buffer that hold a part of an extent, as a view."""
        return slot.memory[part.buffer_offset : part.buffer_offset + part.nbytes]

    def _mark_prefetched(self, slot: _Slot) -> None:
        """Mark a buffer as awaited from now on, also if its pack was used before."""
        slot.used, slot.hinted = 0, self._clock

    def _is_awaited(self, slot: _Slot) -> bool:
        """Return whether a buffer's pack was prefetched and its use is still expected: it was not acquired since, and
        fewer than eight `acquire` calls per buffer of the ring have passed.
        """
        return slot.used == 0 and self._clock - slot.hinted <= _PATIENCE * len(self._slots)

    def _mark_used(self, slot: _Slot) -> None:
        """Count one `acquire` on the ring's clock, and mark a buffer as used now."""
        self._clock += 1
        slot.used = self._clock
