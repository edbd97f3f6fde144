"""A ring of host buffers in front of an extent store: reads run ahead, writes trail behind, the middle computes."""

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

__all__ = ["BufferContent", "BufferRing", "BufferedExtent", "lay_out"]

_PATIENCE = 8  # a hint is forgotten when every buffer was used this often without it


@dataclass(frozen=True)
class BufferedExtent:
    """``nbytes`` at ``extent_offset`` of the extent ``name``, kept at ``buffer_offset`` of a buffer."""

    name: str
    extent_offset: int
    nbytes: int
    buffer_offset: int


@dataclass(frozen=True)
class BufferContent:
    """Extents that come and go together in one buffer of at least ``nbytes``."""

    name: str
    parts: tuple[BufferedExtent, ...]
    nbytes: int


def lay_out(name: str, pieces: Iterable[tuple[str, int, int]]) -> BufferContent:
    """A pack of (extent name, offset, bytes) pieces, each as far from a page boundary in memory as in its extent, so
    that direct I/O needs no copy.
    """
    parts: list[BufferedExtent] = []
    position = 0
    for extent, offset, nbytes in pieces:
        shift = offset % PAGE
        parts.append(BufferedExtent(extent, offset, nbytes, position + shift))
        position += page_rounded(shift + nbytes)
    return BufferContent(name, tuple(parts), position)


@dataclass
class _Slot:
    """One buffer. It is free (no pack), idle (a pack nobody holds) or held."""

    memory: torch.Tensor
    pack: BufferContent | None = None
    holders: int = 0
    dirty: bool = False
    writing: bool = False
    used: int = 0  # when it was last acquired; 0 while it was only prefetched
    hinted: int = 0  # when it was last prefetched
    pending: list[tuple[BufferedExtent, Request]] = field(default_factory=list)

    def settled(self) -> bool:
        return all(request.done() for _, request in self.pending)


class BufferRing:
    """``buffer_count`` buffers, each grown to the largest pack it carried, at least ``buffer_bytes`` from the start.

    A pack stays in its buffer until the buffer is needed, so what fits is not read again. With ``fixed`` a larger pack
    is refused. ``pin`` registers the buffers with an accelerator. ``trace`` gets the transfers as "<hop> in" and "<hop>
    out". Not for several threads.
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
        self._slots = [_Slot(self._buffer(buffer_bytes)) for _ in range(buffer_count)]
        self._clock = 0

    @property
    def resident_bytes(self) -> int:
        """Host memory of all buffers, in whole pages."""
        return sum(page_rounded(slot.memory.numel()) for slot in self._slots)

    def prefetch(self, packs: Iterable[BufferContent]) -> None:
        """Start reading packs into buffers that are free now, and keep those that are here; stop where none is free."""
        for pack in packs:
            known = self._find(pack)
            if known is not None:
                if not known.holders:
                    self._hint(known)
                continue
            slot = self._free_now()
            if slot is None:
                return
            self._read(slot, pack)
            self._hint(slot)

    def is_here(self, pack: BufferContent) -> bool:
        """Return whether `acquire` would return at once."""
        slot = self._find(pack)
        return slot is not None and slot.settled()

    def acquire(self, pack: BufferContent, *, fresh: bool = False) -> torch.Tensor:
        """The pack's bytes, writable until `release`; with ``fresh`` they are not read and their content is arbitrary.

        Raises ShardError for a transfer that failed, StoreFullError when every buffer is held.
        """
        slot = self._find(pack)
        if slot is None:
            slot = self._vacate()
            if fresh:
                self._fit(slot, pack)
                slot.pack = pack
            else:
                self._read(slot, pack)
        self._settle(slot)
        slot.holders += 1
        self._touch(slot)
        return slot.memory[: pack.nbytes]

    def release(self, pack: BufferContent, *, dirty: bool) -> None:
        """Give a pack back. Where anyone who held it says ``dirty``, the last release starts writing it."""
        slot = self._find(pack)
        if slot is None or slot.holders == 0:
            raise ShardError(f"'{pack.name}' was released but not acquired", tensor=pack.name)
        slot.holders -= 1
        slot.dirty |= dirty
        if slot.dirty and slot.holders == 0:
            self._write(slot, pack)

    def drop(self, pack: BufferContent) -> None:
        """Give a pack back that nobody wrote, and forget it: its extents will change."""
        self.release(pack, dirty=False)
        self.remove(pack)

    def remove(self, pack: BufferContent) -> None:
        """Forget what a buffer has of a pack that nobody holds; nothing of it may be under way."""
        slot = self._find(pack)
        if slot is not None and not slot.holders:
            slot.pack = None

    def discard(self, pack: BufferContent) -> None:
        """Give a held pack back without keeping what was written to its buffer."""
        slot = self._find(pack)
        if slot is not None:
            self._abandon(slot)

    def forget(self) -> None:
        """Drop everything, whatever became of its transfers, which are waited for: all of it will be written anew."""
        for slot in self._slots:
            with suppress(ShardError):
                self._settle(slot)
            slot.pack, slot.holders, slot.dirty = None, 0, False

    def flush(self) -> None:
        """Block until every write has ended; raise the first that failed, after all have ended."""
        with ExitStack() as stack:
            for slot in self._slots:
                stack.callback(self._settle, slot)

    def _find(self, pack: BufferContent) -> _Slot | None:
        return next((slot for slot in self._slots if slot.pack is not None and slot.pack.name == pack.name), None)

    def _free_now(self) -> _Slot | None:
        """A buffer that can be taken without waiting and holds nothing that is about to be used."""
        idle = [
            slot
            for slot in self._slots
            if slot.pack is None or (not slot.holders and not self._is_awaited(slot) and slot.settled())
        ]
        slot = min(idle, key=lambda slot: (slot.pack is not None, slot.used), default=None)
        if slot is not None:
            self._settle(slot)
            slot.pack = None
        return slot

    def _vacate(self) -> _Slot:
        """A buffer for a pack that is needed now: a free one, else the longest unused, else the last one prefetched."""
        slot = self._free_now()
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

    def _read(self, slot: _Slot, pack: BufferContent) -> None:
        self._fit(slot, pack)
        slot.pack = pack
        slot.writing = False
        try:
            for part in pack.parts:
                with naming(part.name, "read"):
                    request = self._store.read(part.name, self._memory(slot, part), part.extent_offset)
                self._follow("in", part, request)
                slot.pending.append((part, request))
        except BaseException:
            self._abandon(slot)
            raise

    def _write(self, slot: _Slot, pack: BufferContent) -> None:
        slot.writing, slot.dirty = True, False
        try:
            for part in pack.parts:
                with naming(part.name, "write"):
                    request = self._store.write(part.name, self._memory(slot, part), part.extent_offset)
                self._follow("out", part, request)
                slot.pending.append((part, request))
        except BaseException:
            self._abandon(slot)
            raise

    def _settle(self, slot: _Slot) -> None:
        """Wait for a buffer's transfers; a failed one empties the buffer: it is not what the store holds."""
        try:
            with self._waiting(slot):
                while slot.pending:
                    part, request = slot.pending[-1]
                    with naming(part.name, "write" if slot.writing else "read"):
                        request.wait()
                    slot.pending.pop()
        except BaseException:
            self._abandon(slot)
            raise
        slot.writing = False

    def _follow(self, way: str, part: BufferedExtent, request: Request) -> None:
        if self._trace is not None:
            self._trace.follow(f"{self._hop} {way}", part.name, part.nbytes, request.wait)

    def _waiting(self, slot: _Slot) -> AbstractContextManager[None]:
        if self._trace is None or slot.pack is None or slot.settled():
            return nullcontext()
        return self._trace.span(f"{self._hop} {'out' if slot.writing else 'in'}", slot.pack.name, waiting=True)

    def _abandon(self, slot: _Slot) -> None:
        """Empty a buffer whose transfer failed; new memory, since other transfers may still use the old."""
        nbytes = slot.memory.numel()
        slot.pack, slot.holders, slot.dirty, slot.writing, slot.used = None, 0, False, False, 0
        slot.pending.clear()
        slot.memory = self._buffer(nbytes)

    def _fit(self, slot: _Slot, pack: BufferContent) -> None:
        if slot.memory.numel() >= pack.nbytes:
            return
        if self._fixed:
            raise StoreFullError(
                f"'{pack.name}' needs a buffer of {pack.nbytes} bytes, those of this store have {slot.memory.numel()}; "
                "raise buffer_bytes (buffer_size in a configuration), or leave it out",
                tensor=pack.name,
            )
        slot.memory = self._buffer(pack.nbytes)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return aligned_buffer(page_rounded(nbytes), HostUse(f"buffers of {self._hop}", pin=self._pin))

    def _memory(self, slot: _Slot, part: BufferedExtent) -> torch.Tensor:
        return slot.memory[part.buffer_offset : part.buffer_offset + part.nbytes]

    def _hint(self, slot: _Slot) -> None:
        slot.used, slot.hinted = 0, self._clock

    def _is_awaited(self, slot: _Slot) -> bool:
        """Return whether a buffer was prefetched and will be used; what nobody asked for in a long time will not."""
        return slot.used == 0 and self._clock - slot.hinted <= _PATIENCE * len(self._slots)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.used = self._clock
