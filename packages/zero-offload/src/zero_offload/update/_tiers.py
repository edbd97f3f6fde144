"""Tiers of masters and moments. A tier hands out one slice after the other and keeps what was changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .._buffer_ring import BufferContent, BufferRing, lay_out
from .._extents import DTYPE_NAMES, naming, open_extents
from .._memory import HostBlock, page_rounded
from .._protocols import Extent, Generation
from ..ends import HostUse
from ..trace import Trace
from ._slices import Slice, slice_bytes

__all__ = ["HostTier", "LoadedSlice", "NvmeOptions", "NvmeTier", "SplitTier", "Tier", "host_bytes", "ring_bytes"]

_Tensors = dict[str, torch.Tensor]


class LoadedSlice(NamedTuple):
    """One slice in host memory: its index, and the tensors of each of its spans, by kind."""

    number: int
    tensors: list[_Tensors]


class Tier(Protocol):
    """Keeps the slices of one update. The content of a slice that was never kept is arbitrary."""

    def order(self, indices: Sequence[int]) -> list[int]:
        """Return the slices' indices, given in ascending order, in the order that costs the fewest transfers."""

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        """Yield each slice in turn, valid until the next one is requested; with ``dirty`` the caller changes it and the
        tier must keep it.

        Iterate to the end, or close the iterator: then the changes to the current slice are lost.
        """

    def reset(self) -> None:
        """Discard the content of every slice, and the errors of failed transfers."""

    def memory(self) -> dict[str, int]:
        """Return the bytes by what holds them: ``states`` or ``ring`` in host memory, ``nvme`` in files, ``device``."""

    def bytes_written(self) -> int:
        """Return the bytes written to drives so far."""

    def flush(self) -> None:
        """Block until everything is on the tier; raise the first write that failed."""

    def carried_bytes(self) -> int:
        """Return the bytes that `seal` would copy now: data not written since the last seal."""

    def seal(self, *, durable: bool) -> Generation | None:
        """End the current generation of the files, durable against a crash if ``durable``; return None where there are
        no files.
        """

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        """Return the extents of each ``<fragment>/<kind>`` in files."""

    def close(self) -> None:
        """Free the memory and remove the files."""


def host_bytes(slices: Sequence[Slice]) -> int:
    """Return the host memory of a `HostTier` with these slices, in bytes: exactly the size of its content."""
    return sum(kind.nbytes(span.length) for slice_ in slices for span in slice_ for kind in span.fragment.kinds)


class HostTier:
    """One block of host memory of exactly the size of its content.

    ``on_device``: the content is not offloaded, and the device is the CPU.
    """

    def __init__(self, slices: Sequence[Slice], *, on_device: bool = False) -> None:
        self._on_device = on_device
        parts = tuple((span.fragment.name, span.fragment.nbytes(span.length)) for slice_ in slices for span in slice_)
        use = HostUse("masters and optimizer states", on_device=on_device, parts=parts)
        self._block = HostBlock(host_bytes(slices), use)
        self._tensors: list[list[_Tensors]] = [[{} for _ in slice_] for slice_ in slices]
        places = [
            (kind, span, self._tensors[index][number])
            for index, slice_ in enumerate(slices)
            for number, span in enumerate(slice_)
            for kind in span.fragment.kinds
        ]
        position = 0
        # Widest first, so that every tensor is aligned without padding.
        for kind, span, tensors in sorted(places, key=lambda place: -place[0].dtype.itemsize):
            tensors[kind.name] = self._block.view(position, kind.items(span.length), kind.dtype)
            position += kind.nbytes(span.length)

    def order(self, indices: Sequence[int]) -> list[int]:
        return list(indices)

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        for index in indices:
            yield LoadedSlice(index, self._tensors[index])

    def reset(self) -> None:
        """Do nothing: the caller overwrites content that was never kept."""

    def memory(self) -> dict[str, int]:
        states, device = (0, self._block.nbytes) if self._on_device else (self._block.nbytes, 0)
        return {"states": states, "ring": 0, "nvme": 0, "device": device}

    def bytes_written(self) -> int:
        return 0

    def flush(self) -> None:
        """Do nothing: no transfer is under way."""

    def carried_bytes(self) -> int:
        return 0

    def seal(self, *, durable: bool) -> None:
        return None

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        return {}

    def close(self) -> None:
        self._tensors.clear()
        self._block = HostBlock(0, HostUse("nothing"))


def ring_bytes(slices: Sequence[Slice], buffer_count: int) -> int:
    """Return the host memory of an `NvmeTier`, in bytes: ``buffer_count`` buffers of the largest slice, every tensor in
    whole pages.
    """
    return buffer_count * max((page_rounded(slice_bytes(slice_)) for slice_ in slices), default=0)


class NvmeOptions(NamedTuple):
    """Options of the files; see `TierOptions`."""

    paths: Sequence[str]
    buffer_count: int
    pipeline_read: bool
    pipeline_write: bool
    checksums: bool
    verify: bool
    prefix: str
    engine: Any


class NvmeTier:
    """Extents in files, one per fragment and kind, and a ring of buffers.

    While a slice is computed the next ones are read and the ones before it are written. The order reverses from pass to
    pass, so that a pass begins with the slices that the previous one left in the buffers.
    """

    def __init__(self, slices: Sequence[Slice], options: NvmeOptions, trace: Trace | None) -> None:
        self._slices = slices
        self._packs = [_slice_pack(index, slice_) for index, slice_ in enumerate(slices)]
        self._ahead = max(1, options.buffer_count - 2) if options.pipeline_read else 0
        self._write_behind = options.pipeline_write
        self._kept: set[int] = set()
        self._last = -1
        self._stored_bytes = host_bytes(slices)
        self._store = open_extents(
            options.paths,
            prefix=options.prefix,
            checksums=options.checksums,
            verify=options.verify,
            engine=options.engine,
        )
        try:
            self._declare_extents()
            largest = max((pack.nbytes for pack in self._packs), default=0)
            self._ring = BufferRing(
                self._store, buffer_count=options.buffer_count, buffer_bytes=largest, trace=trace, hop="states"
            )
        except BaseException:
            self._store.close(remove=True)
            raise

    def order(self, indices: Sequence[int]) -> list[int]:
        ordered = list(indices)
        return ordered[::-1] if ordered and self._last >= ordered[-1] else ordered

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        for position, index in enumerate(indices):
            self._last = index
            pack, kept = self._packs[index], index in self._kept
            buffer = self._ring.acquire(pack, fresh=not kept)
            ahead = indices[position + 1 : position + 1 + self._ahead]
            self._ring.prefetch(self._packs[i] for i in ahead if i in self._kept)
            finished = False
            try:
                yield LoadedSlice(index, self._tensors(index, buffer))
                finished = True
            finally:
                if not finished or not (kept or dirty):
                    self._ring.discard(pack)
            if dirty:
                self._kept.add(index)
            if dirty or kept:
                self._ring.release(pack, dirty=dirty)
            if not self._write_behind:
                self._ring.flush()

    def reset(self) -> None:
        self._ring.forget()
        self._kept.clear()

    def memory(self) -> dict[str, int]:
        return {"states": 0, "ring": self._ring.resident_bytes, "nvme": self._stored_bytes, "device": 0}

    def bytes_written(self) -> int:
        return self._store.bytes_written()

    def flush(self) -> None:
        self._ring.flush()

    def carried_bytes(self) -> int:
        with naming("masters and states", "seal"):
            return self._store.carried_bytes()

    def seal(self, *, durable: bool) -> Generation:
        self.flush()
        with naming("masters and states", "seal"):
            return self._store.seal(durable=durable)

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        return self._store.extents()

    def close(self) -> None:
        self._store.close(remove=True)

    def _declare_extents(self) -> None:
        """Declare the size and element type of every extent."""
        ends: dict[tuple[str, str], tuple[int, str]] = {}
        for slice_ in self._slices:
            for span in slice_:
                for kind in span.fragment.kinds:
                    end = kind.nbytes(span.begin + span.length)
                    ends[span.fragment.name, kind.name] = (end, DTYPE_NAMES.get(kind.dtype, "U8"))
        for (fragment, name), (end, dtype) in ends.items():
            self._store.declare(f"{fragment}/{name}", end, dtype)

    def _tensors(self, index: int, buffer: torch.Tensor) -> list[_Tensors]:
        """Return the tensors of a slice's spans, by kind, as views of its buffer."""
        parts = iter(self._packs[index].parts)
        tensors: list[_Tensors] = []
        for span in self._slices[index]:
            own: _Tensors = {}
            for kind in span.fragment.kinds:
                part = next(parts)
                own[kind.name] = buffer[part.buffer_offset : part.buffer_offset + part.nbytes].view(kind.dtype)
            tensors.append(own)
        return tensors


def _slice_pack(index: int, slice_: Slice) -> BufferContent:
    """Return a slice as a pack of the extents ``<fragment>/<kind>``."""
    pieces = [
        (f"{span.fragment.name}/{kind.name}", kind.nbytes(span.begin), kind.nbytes(span.length))
        for span in slice_
        for kind in span.fragment.kinds
    ]
    return lay_out(f"slice {index}", pieces)


class SplitTier:
    """The first ``count`` slices on one tier, the rest on another."""

    def __init__(self, first: Tier, rest: Tier, count: int) -> None:
        self._first = first
        self._rest = rest
        self._count = count

    def order(self, indices: Sequence[int]) -> list[int]:
        first = self._first.order([i for i in indices if i < self._count])
        return first + [i for i in indices if i >= self._count]

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        yield from self._first.visit([i for i in indices if i < self._count], dirty=dirty)
        for visit in self._rest.visit([i - self._count for i in indices if i >= self._count], dirty=dirty):
            yield LoadedSlice(visit.number + self._count, visit.tensors)

    def reset(self) -> None:
        self._first.reset()
        self._rest.reset()

    def memory(self) -> dict[str, int]:
        first, rest = self._first.memory(), self._rest.memory()
        return {what: first[what] + rest[what] for what in first}

    def bytes_written(self) -> int:
        return self._first.bytes_written() + self._rest.bytes_written()

    def flush(self) -> None:
        self._first.flush()
        self._rest.flush()

    def carried_bytes(self) -> int:
        return self._first.carried_bytes()

    def seal(self, *, durable: bool) -> Generation | None:
        return self._first.seal(durable=durable)

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        return {**self._first.extents(), **self._rest.extents()}

    def close(self) -> None:
        self._first.close()
        self._rest.close()
