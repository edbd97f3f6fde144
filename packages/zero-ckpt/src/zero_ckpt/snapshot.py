"""Copies of memory for saves in the background: some are made at once, the others on another thread.

A snapshot is the intervals of one save with their data copied; an arena is the memory that holds the copies. `copy` is
a function that copies bytes, such as `move_memory`. An interval with a `version` is copied later: the function tells
whether its memory was written before that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from .dry_run import current_dry_run
from .errors import CheckpointError
from .types import ITEMSIZE, FileExtent, Interval, byte_view
from .writer import interval_length

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COPY_BYTES = 4 << 20
_ALIGNMENT = 64
_ALONE_BYTES = 4 << 20
"""Up to this size copying takes less time than waking another thread."""
_HANDOVER_SECONDS = 5e-4

LaterIntervals = Callable[[Sequence[memoryview]], Iterable[Interval]]
"""A function that returns further intervals of a save, called on the copying thread: parts of the copies that it is
given, or memory that nobody writes until it is copied."""


Copy = Callable[[Sequence[memoryview], Sequence[memoryview]], object]
"""A function that copies each of its second memories to the writable one of equal size at the same place of its first
argument, without the GIL."""


def no_intervals(_copies_of: Sequence[memoryview]) -> Iterable[Interval]:
    """Return no intervals: the default function `later_intervals` of a save, which has no further intervals to copy in
    the background."""
    return ()


class Arena:
    """Memory for one snapshot, kept for the next, whose copies overwrite it.

    Large copies that are made at once are shared by the caller and the threads of a pool, `threads` together (at most
    one per processor); the function `copy` copies the bytes. `allow` is called with a number of bytes before they are
    allocated; an exception of it ends the save.
    """

    def __init__(self, threads: int, allow: Callable[[int], object], copy: Copy) -> None:
        self._copy = copy
        self._helpers = min(threads, os.cpu_count() or 1) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="zero-ckpt-copy")
        self._kept, self._now, self._later = _Memory(allow), _Memory(allow), _Memory(allow)

    def start(self, memory: Sequence[Buffer]) -> CopyUnderWay:
        """Start copying `memory` into this arena on threads of the pool, and return the copy under way for `begin`.

        The memory must not change until `begin` has returned or `CopyUnderWay.end` was called.
        """
        buffers = [byte_view(buffer) for buffer in memory]
        places = self._kept.places([buffer.nbytes for buffer in buffers])
        chunks = [pair for target, source in zip(places, buffers, strict=True) for pair in _chunks(target, source)]
        return CopyUnderWay(places, chunks, self._copy, self._pool, self._helpers)

    def begin(self, intervals: list[Interval], copying: CopyUnderWay, later_intervals: LaterIntervals) -> Snapshot:
        """Return a snapshot of `intervals`, to be completed by `Snapshot.finish`.

        `copying` is what `start` returned; on return its copies are made, as are those of all intervals without a
        `version`, whose memory may then change. `finish` copies the intervals with a `version` and those that
        `later_intervals` returns. Raises CheckpointError for an invalid interval, and the exceptions of `allow` and of
        an interval's function.
        """
        copies = _copies_of(intervals, self._now.places([*map(_nbytes, intervals)]))
        chunks = []
        for copy in copies:
            if copy is None or copy.interval.version is not None:
                continue
            if callable(copy.interval.data):  # its buffer is only good until the next one is asked for
                copy.run(self._copy)
            else:
                chunks += copy.chunks()
        CopyUnderWay((), chunks, self._copy, self._pool, self._helpers).finish()
        copying.finish()
        return Snapshot(
            [source if copy is None else copy.copied() for source, copy in zip(intervals, copies, strict=True)],
            [copy for copy in copies if copy is not None and copy.interval.version is not None],
            lambda: self._background_copies(later_intervals(copying.places)),
            self._copy,
        )

    def close(self) -> None:
        """End the threads after the copies that they have begun, and free the memory once no view of it is held."""
        self._pool.shutdown()
        for memory in (self._kept, self._now, self._later):
            memory.free()

    def _background_copies(self, intervals: Iterable[Interval]) -> tuple[list[Interval], list[_Copy]]:
        """Return (intervals, copies): the given intervals with their data in this arena, and the copies that
        `Snapshot.finish` has to make for that. Nothing is copied yet.

        Data that is part of the copies of `start` lies in the arena already and needs no copy.
        """
        given = list(intervals)
        sizes = [0 if self._kept.has(interval.data) else _nbytes(interval) for interval in given]
        copies = [
            None if self._kept.has(interval.data) else copy
            for interval, copy in zip(given, _copies_of(given, self._later.places(sizes)), strict=True)
        ]
        found = [source if copy is None else copy.copied() for source, copy in zip(given, copies, strict=True)]
        return found, [copy for copy in copies if copy is not None]


class CopyUnderWay:
    """A copy of memory that is being made into `places`, by the caller of `finish` and, when it is large, by threads of
    `pool` too.

    `chunks` are its (target, source) pairs, and `copy` copies them; `helpers` is the number of threads that help with
    more than 4 MiB. The threads start at construction. The first of them takes a quarter in one batch: it needs the GIL
    for each further batch, and a caller with work of its own does not release the GIL soon.
    """

    def __init__(
        self,
        places: Sequence[memoryview],
        chunks: Sequence[tuple[memoryview, memoryview]],
        copy: Copy,
        pool: ThreadPoolExecutor,
        helpers: int,
    ) -> None:
        self.places = places
        self._copy = copy
        nbytes = sum(len(target) for target, _ in chunks)
        helpers = helpers if nbytes > _ALONE_BYTES else 0
        self._waiting = iter(_batches(chunks, nbytes // 4 if helpers else 0))
        self._begun = threading.Event()
        self._works = [pool.submit(self._help) for _ in range(helpers)]
        if self._works:
            self._begun.wait(_HANDOVER_SECONDS)

    def finish(self) -> None:
        """Help copying and return when everything is copied. Raises the exception of a copy that failed here or on a
        thread."""
        try:
            self._copy_batches()
        finally:
            self.end()
        for work in self._works:
            if not work.cancelled():
                work.result()

    def end(self) -> None:
        """Drop the copies that have not begun, and return when nothing is being copied any more."""
        for _ in self._waiting:
            pass
        wait([work for work in self._works if not work.cancel()])

    def _help(self) -> None:
        """Copy batches until none is left; runs on a thread of the pool."""
        self._begun.set()
        self._copy_batches()

    def _copy_batches(self) -> None:
        """Copy batches that no other thread has taken, until none is left."""
        for targets, sources in self._waiting:  # the next one is taken under the GIL
            self._copy(targets, sources)


class _Memory:
    """One block of memory, allocated when it is first needed and again when it has to be larger.

    `allow` is called with the number of bytes before that, and may raise to refuse them.
    """

    def __init__(self, allow: Callable[[int], object]) -> None:
        self._allow = allow
        self._block: mmap.mmap | None = None

    def places(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return one view of the block for each of `sizes`, in bytes; each is 64-byte aligned and has arbitrary
        content. They overlap with the views of earlier calls, except when the block had to grow: then views still held
        keep the old block alive.

        Raises the exceptions of `allow`. In a dry run (see `zero_ckpt.dry_run`) `allow` is not called, and bytes are
        only counted.
        """
        begins = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        if begins[-1] == 0:
            return [memoryview(b"")] * len(sizes)
        if self._block is None or len(self._block) < begins[-1]:
            before = 0 if self._block is None else len(self._block)
            self._block = None
            dry_run = current_dry_run()
            if dry_run is None:
                self._allow(begins[-1])
            else:
                dry_run.copied_nbytes += max(begins[-1], mmap.PAGESIZE) - before
            self._block = _private_memory(max(begins[-1], mmap.PAGESIZE))
        view = memoryview(self._block)
        return [view[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]

    def free(self) -> None:
        """Drop the block; its memory is freed with the last view of it."""
        self._block = None

    def has(self, data: object) -> bool:
        """Return whether `data` is a view into this block."""
        return isinstance(data, memoryview) and data.obj is self._block and self._block is not None


def _private_memory(nbytes: int) -> mmap.mmap:
    """Return new memory of `nbytes` zeros, in huge pages where there are any; shared memory cannot have them.

    Forked processes do not inherit it: otherwise the first write after a fork would copy its pages.
    """
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            block.madvise(getattr(mmap, advice))
    return block


@dataclass(frozen=True)
class Snapshot:
    """`intervals` with their data in an arena; complete once `finish` has made the remaining copies.

    `later` are the copies of intervals with a `version`. `later_intervals` is called by `finish` and returns (further
    intervals with their data in the arena, the copies to be made for them); `copy` makes the copies.
    """

    intervals: list[Interval]
    later: list[_Copy]
    later_intervals: Callable[[], tuple[list[Interval], list[_Copy]]]
    copy: Copy

    def finish(self) -> None:
        """Make the remaining copies and add the intervals of `later_intervals` to `intervals`; called once, on any
        thread.

        Raises CheckpointError for memory that was written since the save began, and the exceptions of
        `later_intervals`.
        """
        intervals, copies = self.later_intervals()
        for copy in [*self.later, *copies]:
            copy.run(self.copy)
            if _version(copy.interval) != copy.version:
                raise CheckpointError(
                    f"{copy.interval.name!r} ({copy.interval.kind}) was written while it was being copied: wait "
                    "for the copy of a background save before you change it"
                )
        self.intervals.extend(intervals)


@dataclass(frozen=True)
class _Copy:
    """A copy of an interval's data to `target`, made by `run`; `version` is what the interval's version function
    returned when the copy was planned."""

    interval: Interval
    target: memoryview
    version: object

    def copied(self) -> Interval:
        """Return the interval with `target` as its data; that holds the values once `run` has returned."""
        return replace(self.interval, data=self.target, length=None, version=None)

    def run(self, copy: Copy) -> None:
        """Copy the interval's data to the target with the function `copy`."""
        for target, source in self.chunks():
            copy((target,), (source,))

    def chunks(self) -> list[tuple[memoryview, memoryview]]:
        """Return the copy as (target, source) pairs of memory of at most 4 MiB each; calls the interval's data if that
        is a function.

        Raises TypeError when the data is a file's extent.
        """
        data = self.interval.data
        if isinstance(data, FileExtent):
            raise TypeError(f"{self.interval.name!r}: a file's extent is linked, not copied")
        return _chunks(self.target, byte_view(data() if callable(data) else data))


def _copies_of(intervals: Sequence[Interval], places: Sequence[memoryview]) -> list[_Copy | None]:
    """Return, for each interval, the copy of its data to the view in `places` of the same index, still to be run; None
    for extents of files, which are linked instead. Notes the intervals' versions now."""
    return [
        None if isinstance(interval.data, FileExtent) else _Copy(interval, place, _version(interval))
        for interval, place in zip(intervals, places, strict=False)
    ]


def _chunks(target: memoryview, source: memoryview) -> list[tuple[memoryview, memoryview]]:
    """Return two memories of equal size as (target, source) pairs of parts of at most 4 MiB each; an empty list if they
    are empty."""
    if target.nbytes == source.nbytes == 0:
        return []
    if source.nbytes <= _COPY_BYTES:
        return [(target, source)]
    begins = range(0, source.nbytes, _COPY_BYTES)
    return [(target[begin : begin + _COPY_BYTES], source[begin : begin + _COPY_BYTES]) for begin in begins]


def _batches(
    chunks: Sequence[tuple[memoryview, memoryview]], first_bytes: int
) -> list[tuple[list[memoryview], list[memoryview]]]:
    """Group (target, source) chunks into batches (targets, sources), each of which is one call of a copy function.

    The first batch has the leading chunks that together fit into `first_bytes`, as each call needs the GIL; the others
    have one chunk each.
    """
    sizes = accumulate(len(target) for target, _ in chunks)
    count = sum(1 for nbytes in sizes if nbytes <= first_bytes)
    first = [([target for target, _ in chunks[:count]], [source for _, source in chunks[:count]])] if count else []
    return first + [([target], [source]) for target, source in chunks[count:]]


def _nbytes(interval: Interval) -> int:
    """Return the bytes to copy for an interval; 0 for the extent of a file, which is linked instead. Raises
    CheckpointError for an invalid interval."""
    return 0 if isinstance(interval.data, FileExtent) else interval_length(interval) * ITEMSIZE[interval.dtype]


def _version(interval: Interval) -> object:
    """Return the result of the interval's `version` function, called now; None if it has none."""
    return None if interval.version is None else interval.version()


def copy_nothing(_targets: Sequence[memoryview], _sources: Sequence[memoryview]) -> None:
    """Leave all memory as it is: the function `copy` of dry runs."""


def move_memory(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy each source to the target of the same index with `memmove`: a function `copy`. Raises ValueError when sizes
    differ."""
    for target, source in zip(targets, sources, strict=True):
        _move(target, source)


def _move(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`. Raises ValueError when their sizes differ."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"expected {target.nbytes} bytes, got {source.nbytes}")
    if source.readonly:  # ctypes gives no address of read-only memory
        target[:] = source
        return
    kind = ctypes.c_char * target.nbytes
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), target.nbytes)  # without the GIL
