"""The tier of masters and moments in files.

A span is consecutive elements of a fragment; a slice is the spans that are updated together; its index is its position
in the list of slices. A kind is one tensor of state: ``master``, a moment, or the scales of an 8-bit moment. A pack is
what one buffer holds: parts of extents (named ranges of bytes in the files) that are read and written together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._buffer_ring import BufferRing, Pack, lay_out
from .._extents import DTYPE_NAMES, naming, open_extents
from .._memory import page_rounded
from .._protocols import Extent, Generation, PathUse
from ..swap_paths import SwapPaths
from ..trace import Trace
from ._slices import Slice, slice_bytes
from ._tiers import LoadedSlice, SpanTensors, host_bytes

__all__ = ["NvmeOptions", "NvmeTier", "ring_bytes"]


def ring_bytes(slices: Sequence[Slice], buffer_count: int) -> int:
    """Return the host memory of the buffers of an `NvmeTier`, in bytes: ``buffer_count`` buffers of the size of the
    largest slice, every tensor in whole pages.
    """
    return buffer_count * max((page_rounded(slice_bytes(slice_)) for slice_ in slices), default=0)


class NvmeOptions(NamedTuple):
    """Options of the files and of the ring of buffers, those of the same names in `TierOptions`; ``paths`` is its
    ``path``.
    """

    paths: SwapPaths
    buffer_count: int
    pipeline_read: bool
    pipeline_write: bool
    checksums: bool
    verify: bool
    prefix: str
    engine: Any


class NvmeTier:
    """A `Tier` in files: one extent (a named range of bytes) ``<fragment>/<kind>`` for each fragment and kind in
    ``slices``, and a ring of buffers in host memory.

    While a slice is computed the next ones are read (with ``options.pipeline_read``) and the ones before it are written
    (with ``options.pipeline_write``). The order reverses from pass to pass, so that a pass begins with the slices that
    the previous one left in the buffers. ``trace``, if not None, records the transfers.

    The constructor opens the files and allocates the buffers; OffloadError if the folders cannot be used or another
    process uses them. `close` removes the files.
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
        """Return the indices, given in ascending order, reversed if the last visit ended at the last of them or beyond,
        so that the slices still in the buffers come first.
        """
        ordered = list(indices)
        return ordered[::-1] if ordered and self._last >= ordered[-1] else ordered

    def visit(self, indices: Sequence[int], *, dirty: bool) -> Iterator[LoadedSlice]:
        """Yield the slices with these indices in turn, each in a buffer, valid until the next one is requested. With
        ``dirty`` the caller changes each slice, and writing it starts when the next one is requested.

        A slice that was never visited with ``dirty`` is not read. If the iterator is closed, the changes to the current
        slice are lost. ShardError if a slice cannot be read or an earlier one not written.
        """
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
        """Discard the content of every slice and of all buffers, after waiting for their transfers, whose errors are
        ignored.
        """
        self._ring.forget()
        self._kept.clear()

    def memory(self) -> dict[str, int]:
        """Return the bytes of the buffers as ``ring``, of all states in files as ``nvme``; ``states`` and ``device``
        are 0.
        """
        return {"states": 0, "ring": self._ring.resident_bytes, "nvme": self._stored_bytes, "device": 0}

    def bytes_written(self) -> int:
        """Return the bytes that were written to files since the start."""
        return self._store.bytes_written()

    def path_use(self) -> Sequence[PathUse]:
        """Return, for each folder of the files, the bytes written and read so far, its speed and its state."""
        return self._store.path_use()

    def flush(self) -> None:
        """Block until all writes under way have ended; raise the first that failed."""
        self._ring.flush()

    def carried_bytes(self) -> int:
        """Return the bytes that `seal` would copy now: data that was not written since the last seal and cannot be
        carried over by sharing blocks.
        """
        with naming("masters and states", "seal"):
            return self._store.carried_bytes()

    def seal(self, *, durable: bool) -> Generation:
        """Wait for writes under way, end the current generation of the files and return it; with ``durable`` it
        survives a crash. ShardError if a write failed.
        """
        self.flush()
        with naming("masters and states", "seal"):
            return self._store.seal(durable=durable)

    def extents(self) -> Mapping[str, Sequence[Extent]]:
        """Return, for each ``<fragment>/<kind>``, the extents (path, offset, bytes, checksum) that hold it in files."""
        return self._store.extents()

    def close(self) -> None:
        """Remove the files; the buffers are freed with this object."""
        self._store.close(remove=True)

    def _declare_extents(self) -> None:
        """Declare the size and element type of every extent to the store, which needs them before the first write."""
        ends: dict[tuple[str, str], tuple[int, str]] = {}
        for slice_ in self._slices:
            for span in slice_:
                for kind in span.fragment.kinds:
                    end = kind.nbytes(span.begin + span.length)
                    ends[span.fragment.name, kind.name] = (end, DTYPE_NAMES.get(kind.dtype, "U8"))
        for (fragment, name), (end, dtype) in ends.items():
            self._store.declare(f"{fragment}/{name}", end, dtype)

    def _tensors(self, index: int, buffer: torch.Tensor) -> list[SpanTensors]:
        """Return the tensors of each span of slice ``index``, by kind, as views of ``buffer`` (1-D, uint8), which has
        the slice's pack.
        """
        parts = iter(self._packs[index].parts)
        tensors: list[SpanTensors] = []
        for span in self._slices[index]:
            own: SpanTensors = {}
            for kind in span.fragment.kinds:
                part = next(parts)
                own[kind.name] = buffer[part.buffer_offset : part.buffer_offset + part.nbytes].view(kind.dtype)
            tensors.append(own)
        return tensors


def _slice_pack(index: int, slice_: Slice) -> Pack:
    """Return the pack of slice number ``index``: the ranges that the slice covers of the extents ``<fragment>/<kind>``,
    span by span, kind by kind.
    """
    pieces = [
        (f"{span.fragment.name}/{kind.name}", kind.nbytes(span.begin), kind.nbytes(span.length))
        for span in slice_
        for kind in span.fragment.kinds
    ]
    return lay_out(f"slice {index}", pieces)
