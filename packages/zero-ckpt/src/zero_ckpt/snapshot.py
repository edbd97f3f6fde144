"""Copies of intervals in memory that is kept: some at once, the others behind the caller."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .errors import CheckpointError
from .types import ITEMSIZE, FileExtent, Interval, byte_view
from .writer import interval_length

_COPY_BYTES = 16 << 20
_ALIGNMENT = 64
_ALONE_BYTES = 4 << 20
"""So much is copied faster than another thread is woken."""


class Arena:
    """Memory for one snapshot, kept for the next.

    `threads` copy what is copied at once, where that is much; they are kept too, until `close`. `allow` is called with
    a number of bytes before so many are allocated; what it raises ends the save.
    """

    def __init__(self, threads: int, allow: Callable[[int], object]) -> None:
        self._allow = allow
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="zero-ckpt-copy")
        self._memory: mmap.mmap | None = None

    def begin(self, intervals: list[Interval]) -> Snapshot:
        """A snapshot of `intervals` in this arena, with those copied that may change as soon as this returns."""
        places, total = [], 0
        for interval in intervals:
            places.append(total)
            total += -(-_nbytes(interval) // _ALIGNMENT) * _ALIGNMENT
        memory = memoryview(self._reserve(total))
        copies = [
            None
            if isinstance(interval.data, FileExtent)
            else _Copy(interval, memory[place : place + _nbytes(interval)], _version(interval))
            for interval, place in zip(intervals, places, strict=True)
        ]
        self._copy_now([copy for copy in copies if copy is not None and copy.interval.version is None])
        return Snapshot(
            [source if copy is None else copy.copied() for source, copy in zip(intervals, copies, strict=True)],
            [copy for copy in copies if copy is not None and copy.interval.version is not None],
        )

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _copy_now(self, copies: list[_Copy]) -> None:
        chunks = []
        for copy in copies:
            if callable(copy.interval.data):  # its buffer is only good until the next one is asked for
                copy.run()
            else:
                chunks += copy.chunks()
        alone = sum(len(target) for target, _ in chunks) <= _ALONE_BYTES
        works = [] if alone else [self._pool.submit(_copy, *chunk) for chunk in chunks]
        for chunk in chunks if alone else ():
            _copy(*chunk)
        for work in works:
            work.result()

    def _reserve(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = None
            self._allow(nbytes)
            self._memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return self._memory


@dataclass(frozen=True)
class Snapshot:
    """`intervals` with their data in an arena, complete when `finish` has copied what is `later`."""

    intervals: list[Interval]
    later: list[_Copy]

    def finish(self) -> None:
        """Copy what is left, on any thread, once. Raises CheckpointError for memory that was written meanwhile."""
        for copy in self.later:
            copy.run()
            if _version(copy.interval) != copy.version:
                raise CheckpointError(
                    f"{copy.interval.name!r} ({copy.interval.kind}) was written while it was being copied: wait "
                    "for the copy of a background save before you change it"
                )


@dataclass(frozen=True)
class _Copy:
    """An interval, where its bytes go, and its version when the save began."""

    interval: Interval
    target: memoryview
    version: object

    def copied(self) -> Interval:
        """The interval with its data in the arena."""
        return replace(self.interval, data=self.target, length=None, version=None)

    def run(self) -> None:
        """Copy it."""
        for target, source in self.chunks():
            _copy(target, source)

    def chunks(self) -> list[tuple[memoryview, memoryview]]:
        """Return pairs of target and source memory, 16 MiB each; calls the interval's data where that is a function."""
        data = self.interval.data
        if isinstance(data, FileExtent):
            raise TypeError(f"{self.interval.name!r}: a file's extent is linked, not copied")
        source = byte_view(data() if callable(data) else data)
        starts = range(0, source.nbytes, _COPY_BYTES)
        return [(self.target[begin : begin + _COPY_BYTES], source[begin : begin + _COPY_BYTES]) for begin in starts]


def _nbytes(interval: Interval) -> int:
    return 0 if isinstance(interval.data, FileExtent) else interval_length(interval) * ITEMSIZE[interval.dtype]


def _version(interval: Interval) -> object:
    return None if interval.version is None else interval.version()


def _copy(target: memoryview, source: memoryview) -> None:
    if source.readonly:  # ctypes gives no address of read-only memory
        target[:] = source
        return
    if target.nbytes != source.nbytes:
        raise ValueError(f"expected {target.nbytes} bytes, got {source.nbytes}")
    kind = ctypes.c_char * target.nbytes
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), target.nbytes)  # without the GIL
