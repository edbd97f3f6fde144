"""Where masters and states live. A tier hands out one slice after the other; what was changed goes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .._extents import DTYPE_NAMES, open_extents
from .._memory import HostBlock, page_rounded
from .._ring import Pack, Ring, lay_out
from ._entries import Entry, Fragment

__all__ = ["HostTier", "NvmeTier", "Tier", "Visit"]


class Visit(NamedTuple):
    """One slice in host memory: its fragments' tensors by kind. ``fresh``: their content is arbitrary so far."""

    number: int
    tensors: list[dict[str, torch.Tensor]]
    fresh: bool


class Tier(Protocol):
    """Keeps the slices of one optimizer."""

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[Visit]:
        """Each slice in turn, valid until the next is asked for; with ``dirty`` it was changed and is kept.

        Iterate to the end, or close the iterator: then the slice at hand is lost.
        """

    def is_fresh(self, index: int) -> bool:
        """Whether a slice was never visited with ``dirty``."""

    def reset(self) -> None:
        """Make every slice fresh."""

    def memory(self) -> dict[str, int]:
        """Bytes by what holds them."""

    def bytes_written(self) -> int:
        """Bytes written to drives so far."""

    def flush(self) -> None:
        """Return when everything is on the tier."""

    def close(self) -> None:
        """Let everything go."""


def host_bytes(entries: Sequence[Entry]) -> int:
    """Host memory of a `HostTier`."""
    return sum(entry.nbytes for entry in entries)


class HostTier:
    """One block of host memory of exactly the size of its content."""

    def __init__(self, entries: Sequence[Entry], slices: Sequence[tuple[Fragment, ...]], *, pin: bool) -> None:
        self._block = HostBlock(host_bytes(entries), pin=pin)
        self._slices = slices
        self._written: set[int] = set()
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        position = 0
        # Widest first, so that every tensor is aligned without padding.
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):
            views = self._views[id(entry)] = {}
            for kind in entry.kinds:
                views[kind] = self._block.view(position, entry.numel, entry.dtype)
                position += entry.numel * entry.dtype.itemsize

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[Visit]:
        for index in indices:
            tensors = [
                {kind: fragment.of(view) for kind, view in self._views[id(fragment.entry)].items()}
                for fragment in self._slices[index]
            ]
            yield Visit(index, tensors, self.is_fresh(index))
            if dirty:
                self._written.add(index)

    def is_fresh(self, index: int) -> bool:
        return index not in self._written

    def reset(self) -> None:
        self._written.clear()

    def memory(self) -> dict[str, int]:
        return {"host": self._block.nbytes, "nvme": 0}

    def bytes_written(self) -> int:
        return 0

    def flush(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self._views.clear()
        self._block = HostBlock(0, pin=False)


def pack_slices(slices: Sequence[tuple[Fragment, ...]]) -> list[Pack]:
    """Each slice as a pack of the extents `<parameter>/<kind>`."""
    return [
        lay_out(
            f"slice {index}",
            [
                (
                    f"{fragment.entry.name}/{kind}",
                    fragment.begin * fragment.entry.dtype.itemsize,
                    fragment.length * fragment.entry.dtype.itemsize,
                )
                for fragment in slice_
                for kind in fragment.entry.kinds
            ],
        )
        for index, slice_ in enumerate(slices)
    ]


def ring_bytes(slices: Sequence[tuple[Fragment, ...]], buffer_count: int) -> int:
    """Host memory of an `NvmeTier`: ``buffer_count`` buffers of the largest slice, every tensor in whole pages."""
    return buffer_count * max((page_rounded(pack.nbytes) for pack in pack_slices(slices)), default=0)


class NvmeTier:
    """Extents in files, one per parameter and kind, and a ring of buffers.

    While a slice is computed the next ones are read and the ones before it are written.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        slices: Sequence[tuple[Fragment, ...]],
        *,
        paths: Sequence[str],
        buffer_count: int,
        checksums: bool,
        verify: bool,
        prefix: str,
        engine: Any,
    ) -> None:
        self._slices = slices
        self._packs = pack_slices(slices)
        self._ahead = max(1, buffer_count - 2)
        self._written: set[int] = set()
        self._stored_bytes = sum(entry.nbytes for entry in entries)
        self._store = open_extents(paths, prefix=prefix, checksums=checksums, verify=verify, engine=engine)
        try:
            for entry in entries:
                for kind in entry.kinds:
                    nbytes = entry.numel * entry.dtype.itemsize
                    self._store.declare(f"{entry.name}/{kind}", nbytes, DTYPE_NAMES[entry.dtype])
            largest = max((pack.nbytes for pack in self._packs), default=0)
            self._ring = Ring(self._store, buffer_count=buffer_count, buffer_bytes=largest)
        except BaseException:
            self._store.close(remove=True)
            raise

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[Visit]:
        for position, index in enumerate(indices):
            pack, fresh = self._packs[index], self.is_fresh(index)
            buffer = self._ring.acquire(pack, fresh=fresh)
            ahead = indices[position + 1 : position + 1 + self._ahead]
            self._ring.prefetch(self._packs[i] for i in ahead if not self.is_fresh(i))
            finished = False
            try:
                yield Visit(index, self._tensors(index, buffer), fresh)
                finished = True
            finally:
                if not finished or (fresh and not dirty):
                    self._ring.discard(pack)
            if dirty:
                self._written.add(index)
            if dirty or not fresh:
                self._ring.release(pack, dirty=dirty)

    def is_fresh(self, index: int) -> bool:
        return index not in self._written

    def reset(self) -> None:
        self._ring.forget()
        self._written.clear()

    def memory(self) -> dict[str, int]:
        return {"host": self._ring.resident_bytes, "nvme": self._stored_bytes}

    def bytes_written(self) -> int:
        return self._store.bytes_written()

    def flush(self) -> None:
        self._ring.flush()

    def close(self) -> None:
        self._store.close(remove=True)

    def _tensors(self, index: int, buffer: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        parts = iter(self._packs[index].parts)
        tensors: list[dict[str, torch.Tensor]] = []
        for fragment in self._slices[index]:
            own: dict[str, torch.Tensor] = {}
            for kind in fragment.entry.kinds:
                part = next(parts)
                own[kind] = buffer[part.buffer_offset : part.buffer_offset + part.nbytes].view(fragment.entry.dtype)
            tensors.append(own)
        return tensors
