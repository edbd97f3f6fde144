"""Write one rank's safetensors file: hash every slice and the whole file while the previous bytes go to disk.

A slice is a run of a tensor's elements in one file of the checkpoint; the plan of a save says which slices this rank
writes. The data of an interval, which slices are taken from, is a buffer, or a function that returns one.
"""

from __future__ import annotations

import errno
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from .checksum import Checksummer, checksum, is_checksum
from .errors import CheckpointError
from .manifest import FileEntry
from .plan import PlannedSlice
from .safetensors_file import encode_header
from .types import ITEMSIZE, FileExtent, Interval, byte_view, numel

if TYPE_CHECKING:
    from typing_extensions import Buffer


class FileSink(Protocol):
    """Takes the bytes of one file, in order, and writes them; a protocol with several implementations.

    Bytes handed to `write` must not change until `drain` or `finish` returns. A sink ends with one call of `finish` or,
    without it, of `abort`. All methods but `abort` may raise OSError, also for an earlier write.
    """

    def write(self, data: memoryview) -> None:
        """Accept the next bytes of the file; may return before they are written."""
        ...

    def drain(self) -> None:
        """Wait until the memory of everything written so far may be reused; the bytes need not be on disk yet."""
        ...

    def finish(self) -> None:
        """Wait until the whole file is on disk, and close it."""
        ...

    def abort(self) -> None:
        """Close the file, which is left incomplete, without waiting for it to be on disk; never raises."""
        ...


OpenSink = Callable[[Path, int], FileSink]
"""Creates a file at a path and returns its sink; the second argument is the file's final size in bytes."""


_UNCACHED = 0x80
"""RWF_DONTCACHE: the kernel writes pages back as they come and does not keep them. Known to Linux from 6.14 on."""


class BufferedSink:
    """A `FileSink` that writes the file `path` through the page cache, on a thread of its own, so that hashing overlaps
    with writing.

    Creating it raises FileExistsError when there is something at `path`; `nbytes` is not used.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._flags = _UNCACHED if sys.platform == "linux" else 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._queue: queue.Queue[memoryview | None] = queue.Queue(maxsize=4)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="zero-ckpt-write", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Queue the next bytes of the file, and wait while four such pieces are queued; `data` must not change until
        `drain` or `finish` returns. Raises the exception of an earlier write.
        """
        self._raise_failure()
        self._queue.put(data)

    def drain(self) -> None:
        """Wait until the memory of everything written so far may be reused. Raises the exception of a failed write."""
        self._queue.join()
        self._raise_failure()

    def finish(self) -> None:
        """Wait until the whole file is on disk, and close it. Raises the exception of a failed write."""
        self._stop()
        try:
            self._raise_failure()
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def abort(self) -> None:
        """End the thread once it has written what is queued, and close the file, whose writes may have failed."""
        self._stop()
        os.close(self._fd)

    def _stop(self) -> None:
        """End the thread after it has written what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _raise_failure(self) -> None:
        """Raise the exception of a write that failed on the thread, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Write what is queued until None is queued; runs on the sink's thread. After a failure, which is kept, take
        items off the queue without writing them."""
        position = 0
        while (data := self._queue.get()) is not None:
            try:
                if self._error is None:
                    position = self._write_all_at(data, position)
            except BaseException as error:  # handed to the caller's thread
                self._error = error
            finally:
                self._queue.task_done()

    def _write_all_at(self, data: memoryview, position: int) -> int:
        """Write all of `data` at byte `position` of the file, and return the position behind it.

        Written pages are kept out of the page cache (RWF_DONTCACHE) until that turns out not to be supported. Raises
        OSError.
        """
        while data:
            try:
                written = os.pwritev(self._fd, [data], position, self._flags)
            except OSError as error:
                if not self._flags or error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._flags = 0  # no RWF_DONTCACHE here: written pages stay cached
                continue
            data, position = data[written:], position + written
        return position


@dataclass(frozen=True)
class WrittenSlice:
    """One slice on disk, as the manifest needs it.

    `index` is the position of its interval in the rank's list, `key` its entry in a safetensors file (empty in a raw
    file), `offset` and `length` its elements in the flattened tensor. `file` is the number of its file among the rank's
    own; `begin` is its first byte in a raw file, None in a safetensors file.
    """

    index: int
    key: str
    offset: int
    length: int
    checksum: str
    file: int = 0
    begin: int | None = None


def slice_key(interval: Interval, offset: int) -> str:
    """Return the safetensors key of the slice of `interval` that begins at element `offset` of the flattened tensor.

    Kinds hold no slash, so keys are unique.
    """
    return f"{interval.kind}/{interval.name}@{offset}"


def file_order(intervals: Sequence[Interval], pieces: Iterable[PlannedSlice]) -> list[PlannedSlice]:
    """Return the planned slices in the order in which they lie in the file: wider dtypes come first, so that each slice
    is aligned to its element size.

    The slices refer to `intervals` by index. Slices of equal width keep their order.
    """
    return sorted(pieces, key=lambda piece: -ITEMSIZE[intervals[piece.index].dtype])


def write_rank_file(
    path: Path, intervals: Sequence[Interval], pieces: Iterable[PlannedSlice], open_sink: OpenSink
) -> tuple[FileEntry, list[WrittenSlice]]:
    """Write the planned slices `pieces` to a new safetensors file and wait until it is on disk. Returns (its manifest
    entry, its slices in file order).

    `pieces` refer to `intervals` by index; the data of these intervals are buffers or functions, not file extents.
    `open_sink` creates the file. Raises OSError with the file's name, or CheckpointError when an interval's data is not
    what it claims; the file is then left incomplete.
    """
    ordered = file_order(intervals, pieces)
    header, nbytes = encode_header(
        (slice_key(intervals[piece.index], piece.offset), intervals[piece.index].dtype, (piece.length,))
        for piece in ordered
    )
    total = Checksummer()
    written: list[WrittenSlice] = []
    sink = open_sink(path, nbytes)
    try:
        total.update(header)
        sink.write(memoryview(header))
        source = _IntervalBytes(intervals, sink)
        for piece in ordered:
            data = source.slice_bytes(piece)
            written.append(
                WrittenSlice(
                    piece.index,
                    slice_key(intervals[piece.index], piece.offset),
                    piece.offset,
                    piece.length,
                    checksum(data),
                )
            )
            total.update(data)
            sink.write(data)
    except BaseException as error:
        sink.abort()
        if isinstance(error, OSError):
            raise _with_path(error, path) from error
        raise
    try:
        sink.finish()
    except OSError as error:
        raise _with_path(error, path) from error
    return FileEntry(path.name, nbytes, total.result(), len(header), checksum(header)), written


def _with_path(error: OSError, path: Path) -> OSError:
    """Return `error` if it names a file, otherwise an error of the same type that names `path`."""
    return type(error)(error.errno, error.strerror, str(path)) if error.filename is None else error


class _IntervalBytes:
    """The bytes of planned slices, which refer to `intervals` by index and are asked for interval by interval. An
    interval's data function is thus called once.

    `sink` is where the caller writes the bytes. It is drained before the next function is called, which may reuse the
    buffer of the last one.
    """

    def __init__(self, intervals: Sequence[Interval], sink: FileSink) -> None:
        self._intervals, self._sink = intervals, sink
        self._index = -1
        self._view = memoryview(b"")

    def slice_bytes(self, piece: PlannedSlice) -> memoryview:
        """Return a view of the bytes of a planned slice. The view is valid until a slice of another interval whose data
        is a function is asked for."""
        interval = self._intervals[piece.index]
        itemsize = ITEMSIZE[interval.dtype]
        if piece.index != self._index:
            self._view = self._open(interval, itemsize)
            self._index = piece.index
        begin = (piece.offset - interval.offset) * itemsize
        return self._view[begin : begin + piece.length * itemsize]

    def _open(self, interval: Interval, itemsize: int) -> memoryview:
        """Return the data of an interval as bytes, calling its data function if that is one; before that, the sink is
        drained.

        `itemsize` is the bytes per element. Raises CheckpointError when the data has another size than the interval.
        """
        data = interval.data
        if callable(data):
            self._sink.drain()
            self._view = memoryview(b"")
            data = data()
        view = byte_view(cast("Buffer", data))
        if view.nbytes != interval_length(interval) * itemsize:
            raise CheckpointError(
                f"{interval.name!r} ({interval.kind}): expected {interval_length(interval)} elements of "
                f"{interval.dtype} from its data function, got {view.nbytes} bytes"
            )
        return view


def interval_length(interval: Interval) -> int:
    """Return the number of elements of an interval: from the size of its data or, for a data function, which is not
    called, from `length`.

    Raises CheckpointError, naming the interval, for an unknown dtype, data that is not `length` whole elements, a
    function without `length`, and elements outside of the shape.
    """
    where = f"{interval.name!r} ({interval.kind})"
    if interval.dtype not in ITEMSIZE:
        raise CheckpointError(f"{where}: unknown dtype {interval.dtype!r}; expected one of {', '.join(ITEMSIZE)}")
    length = interval.length
    if not callable(interval.data):
        nbytes = _data_nbytes(interval.data, where)
        if nbytes % ITEMSIZE[interval.dtype] or length not in (None, nbytes // ITEMSIZE[interval.dtype]):
            raise CheckpointError(
                f"{where}: data of {nbytes} bytes is not {length or 'whole'} {interval.dtype} elements"
            )
        length = nbytes // ITEMSIZE[interval.dtype]
    if length is None:
        raise CheckpointError(f"{where}: an interval whose data is a function needs its length in elements")
    if interval.offset < 0 or length < 0 or interval.offset + length > numel(interval.shape):
        raise CheckpointError(
            f"{where}: elements {interval.offset} to {interval.offset + length} are outside of shape {interval.shape}"
        )
    return length


def _data_nbytes(data: Buffer | FileExtent, where: str) -> int:
    """Return the size in bytes of an interval's data. Raises CheckpointError, whose message begins with `where`, for a
    malformed file extent and for what is no buffer."""
    if isinstance(data, FileExtent):
        if data.file_offset_bytes < 0 or data.nbytes < 0 or not (data.checksum is None or is_checksum(data.checksum)):
            raise CheckpointError(
                f"{where}: {data} is no extent; expected sizes that are not negative, and a checksum such as "
                "'xxh3_64:0123456789abcdef' or None"
            )
        return data.nbytes
    try:
        return memoryview(data).nbytes
    except TypeError as error:
        raise CheckpointError(f"{where}: data is neither a buffer nor a function nor a file extent: {error}") from error
