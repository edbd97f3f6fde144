"""Gradients kept in files between backward and the step. A span is consecutive elements of a fragment; a slice is the
spans that are updated together; its index is its position in the list of slices. A pack is what one buffer holds: parts
of extents that are read and written together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from .._buffer_ring import BufferRing, Pack, lay_out
from .._copy_streams import CopyStream
from .._extents import DTYPE_NAMES, open_extents
from .._memory import page_rounded
from ..trace import Trace
from ._gradients import HOP, copy_to_host, gradient_bytes, known_shard
from ._nvme_tier import NvmeOptions
from ._slices import FlatSpan, Slice
from .plans import ShardPlan

__all__ = ["NvmeGradients", "gradient_ring_bytes"]

_MIN_BUFFERS = 4


def gradient_ring_bytes(shards: Sequence[ShardPlan], slices: Sequence[Slice], buffer_count: int) -> int:
    """Return the host memory of the buffers of an `NvmeGradients`, in bytes: ``buffer_count`` buffers, at least 4, in
    whole pages. Each holds the largest gradient of a shard, or the largest set of gradients that a slice reads.
    """
    packs = [*(_shard_pack(shard) for shard in shards), *(_slice_pack(i, s)[0] for i, s in enumerate(slices))]
    return _buffer_count(buffer_count) * max((page_rounded(pack.nbytes) for pack in packs), default=0)


def _buffer_count(buffer_count: int) -> int:
    """Return ``buffer_count``, raised to at least 4: gradients that arrive from the device hold all but two of the
    buffers, and one each is for the gradient that is borrowed and the one that is being written.
    """
    return max(buffer_count, _MIN_BUFFERS)


class NvmeGradients:
    """A `CollectedGradients` in files: one extent (a named range of bytes) ``<shard>/gradient`` for each shard, and a
    ring of buffers in host memory, through which gradients are collected in backward and read by the step.

    ``shards``: whose gradients are collected. ``slices``: what the step reads, by index. ``device``: where gradients
    are computed. ``options``: of the files, and the number of buffers, of which there are at least 4
    (`gradient_ring_bytes` says how large). ``pin``: the buffers are pinned, so that copies run beside compute.
    ``trace``: records the transfers; None for no record.

    The constructor opens the files and allocates the buffers; OffloadError if the folders cannot be used or another
    process uses them. `close` removes the files.
    """

    def __init__(
        self,
        shards: Sequence[ShardPlan],
        slices: Sequence[Slice],
        device: torch.device,
        options: NvmeOptions,
        *,
        pin: bool,
        trace: Trace | None,
    ) -> None:
        self._slices = slices
        self._copy_stream = CopyStream(device, trace, HOP)
        self._shards = {shard.name: (_shard_pack(shard), shard.grad_dtype) for shard in shards}
        self._packs = [_slice_pack(index, slice_) for index, slice_ in enumerate(slices)]
        self._present: set[str] = set()
        self._acquired: dict[int, Pack] = {}
        self._arriving: deque[tuple[torch.Event | None, str]] = deque()
        self._most_arriving = _buffer_count(options.buffer_count) - 2
        self._stored_bytes = gradient_bytes(shards)
        self._store = open_extents(
            options.paths,
            prefix=f"{options.prefix}-gradients",
            checksums=options.checksums,
            verify=options.verify,
            engine=options.engine,
        )
        try:
            for shard in shards:
                nbytes = shard.numel * shard.grad_dtype.itemsize
                self._store.declare(_extent_name(shard), nbytes, DTYPE_NAMES[shard.grad_dtype])
            count = _buffer_count(options.buffer_count)
            self._ring = BufferRing(
                self._store,
                buffer_count=count,
                buffer_bytes=gradient_ring_bytes(shards, slices, count) // count,
                pin=pin,
                trace=trace,
                hop=HOP,
            )
        except BaseException:
            self._store.close(remove=True)
            raise

    def borrow(self, shard: str) -> tuple[torch.Tensor, bool]:
        """Return a buffer for a shard's gradient (1-D, in its ``grad_dtype``), valid until `give_back`, and whether it
        holds the sum of the gradients so far, read from the file if need be; if not, its content is arbitrary.

        Starts writing gradients that have arrived from the device, and waits for others until a buffer is left, or for
        all of them if this shard's is on its way. ShardError for an unknown shard or a failed transfer; StoreFullError
        if every buffer is held.
        """
        self._write_arrived(at_most=self._most_arriving - 1)
        pack, dtype = known_shard(self._shards, shard)
        if any(name == shard for _, name in self._arriving):
            self._write_arrived(at_most=0)
        again = shard in self._present
        return self._ring.acquire(pack, fresh=not again)[: pack.parts[0].nbytes].view(dtype), again

    def give_back(self, shard: str, *, dirty: bool) -> None:
        """End one `borrow`. With ``dirty`` start writing the gradient to its file; the shard has a gradient from now
        on. Without, the buffer was not changed, and its content is forgotten if the shard has no gradient. ShardError
        for an unknown shard, and for one that is not borrowed.
        """
        pack, _ = known_shard(self._shards, shard)
        if dirty:
            self._ring.release(pack, dirty=True)
            self._present.add(shard)
        elif shard in self._present:
            self._ring.release(pack, dirty=False)
        else:
            self._ring.drop(pack)

    def add(self, shard: str, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """Start copying a gradient to a buffer, added to the sum so far; return the sum on the gradient's device, as
        one part. A later call writes it to its file, once it has arrived. The tensor may be freed at once, but not
        written before `flush`. Waits and raises as `borrow` does.
        """
        own, again = self.borrow(shard)
        event, total = copy_to_host(self._copy_stream, own, gradient, again=again)
        self._arriving.append((event, shard))
        self._present.add(shard)
        self._write_arrived(at_most=self._most_arriving)
        return [total]

    def join(self) -> None:
        """Make the current stream wait for the copies of gradients to buffers; the host does not wait."""
        for event, _ in self._arriving:
            self._copy_stream.join(event)

    def has(self, shard: str) -> bool:
        """Return whether the shard has a gradient since the last `clear`."""
        return shard in self._present

    def _write_arrived(self, *, at_most: int) -> None:
        """Start writing to files the gradients whose copy from the device has ended, oldest first; wait for copies
        until at most ``at_most`` are under way.
        """
        while self._arriving:
            event, shard = self._arriving[0]
            if event is not None and not event.query():
                if len(self._arriving) <= at_most:
                    return
                event.synchronize()
            self._arriving.popleft()
            self.give_back(shard, dirty=True)

    def prefetch(self, index: int) -> None:
        """Start reading the gradients of slice ``index``, as far as buffers are free; do nothing if any of its shards
        has no gradient. Waits first for gradients that are arriving from the device.
        """
        self._write_arrived(at_most=0)
        pack, _ = self._packs[index]
        if all(map(self.has, self._shards_of(index))):
            self._ring.prefetch([pack])

    def acquire(self, index: int) -> list[FlatSpan | None]:
        """Read and return the gradient of each span of slice ``index``, in a buffer, valid until `release`; None for a
        span whose shard has no gradient. ShardError if one cannot be read.
        """
        self._write_arrived(at_most=0)
        present = {shard for shard in self._shards_of(index) if self.has(shard)}
        pack, origins = self._packs[index]
        if len(present) < len(self._shards_of(index)):
            pack, origins = _slice_pack(index, self._slices[index], only=present)
        buffer = self._ring.acquire(pack)
        self._acquired[index] = pack
        found: list[FlatSpan | None] = []
        for span in self._slices[index]:
            shard = span.fragment.shard
            if shard.name not in present:
                found.append(None)
                continue
            begin = origins[shard.name] + (span.fragment.plan.start + span.begin) * shard.grad_dtype.itemsize
            nbytes = span.length * shard.grad_dtype.itemsize
            found.append(FlatSpan(buffer[begin : begin + nbytes].view(shard.grad_dtype), 0, span.length))
        return found

    def release(self, index: int) -> None:
        """Free the buffer that `acquire` read slice ``index`` into, and forget its content."""
        self._ring.drop(self._acquired.pop(index))

    def abort(self) -> None:
        """After a step that failed, empty all buffers, once their transfers have ended, and end the use of all acquired
        slices. Gradients in files stay.
        """
        self._ring.forget()
        self._acquired.clear()

    def clear(self) -> None:
        """Discard all gradients, after waiting for transfers under way; do nothing if there are none."""
        if self._present:
            self._write_arrived(at_most=0)
            self._ring.forget()
            self._present.clear()

    def memory(self) -> dict[str, int]:
        """Return the bytes of the buffers as ``gradients``, and as ``nvme`` those of all shards' gradients in files,
        written or not; ``device`` is 0.
        """
        return {"gradients": self._ring.resident_bytes, "nvme": self._stored_bytes, "device": 0}

    def bytes_written(self) -> int:
        """Return the bytes that were written to files since the start."""
        return self._store.bytes_written()

    def flush(self) -> None:
        """Block until every gradient has arrived from the device and is in its file; raise the first write that failed,
        a ShardError.
        """
        self._write_arrived(at_most=0)
        self._ring.flush()

    def close(self) -> None:
        """Remove the files, with gradients not used yet; the buffers are freed with this object."""
        self._store.close(remove=True)

    def _shards_of(self, index: int) -> dict[str, None]:
        """Return the names of the shards that slice ``index`` has elements of, in order, as the keys of a dict with
        values None.
        """
        return {span.fragment.shard.name: None for span in self._slices[index]}


def _extent_name(shard: ShardPlan) -> str:
    """Return the name of the extent, in the store's files, of a shard's gradient."""
    return f"{shard.name}/gradient"


def _shard_pack(shard: ShardPlan) -> Pack:
    """Return the pack that holds all of a shard's gradient."""
    return lay_out(_extent_name(shard), [(_extent_name(shard), 0, shard.numel * shard.grad_dtype.itemsize)])


def _slice_pack(index: int, slice_: Slice, only: set[str] | None = None) -> tuple[Pack, dict[str, int]]:
    """Return the pack that slice number ``index`` reads, and the origin of each shard's gradient in the buffer, by the
    shard's name.

    The pack has one range of bytes for each shard of the slice, or only for those in ``only`` if that is not None: from
    the shard's first span to the end of its last. The origin is the offset, in bytes, at which element 0 of the shard's
    gradient would be; it is negative if the range starts behind that element.
    """
    ranges: dict[str, tuple[ShardPlan, int, int]] = {}
    for span in slice_:
        shard, begin = span.fragment.shard, span.fragment.plan.start + span.begin
        if only is None or shard.name in only:
            _, first, _ = ranges.get(shard.name, (shard, begin, 0))
            ranges[shard.name] = (shard, first, begin + span.length)
    pieces = [
        (_extent_name(shard), begin * shard.grad_dtype.itemsize, (end - begin) * shard.grad_dtype.itemsize)
        for shard, begin, end in ranges.values()
    ]
    pack = lay_out(f"gradients of slice {index}", pieces)
    origins = {
        shard.name: part.buffer_offset - part.extent_offset
        for (shard, _, _), part in zip(ranges.values(), pack.parts, strict=True)
    }
    return pack, origins
