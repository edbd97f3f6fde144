"""Sealed files that become part of a checkpoint: by a link where that is possible, otherwise by a copy.

An extent is a range of bytes in a file, with a checksum or without one, that holds an interval of a tensor; a slice is
the run of its elements that is to be stored.

[Note: linked files]
A file that nothing writes to any more is taken whole, under a name of its own in the checkpoint directory, as a raw
file: the manifest says at which bytes slices lie, and holds a checksum of every byte of it, those between slices
included. Checksums that came with the extents are believed; they cost no reading. Where neither a hard link nor a clone
is possible (another file system), the wanted bytes are streamed into the rank's safetensors file instead and compared
with those checksums on the way.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from pathlib import Path

from .checksum import Checksummer, checksum
from .direct import has_direct, read_ranges
from .errors import CheckpointError, DamagedError
from .filing import read_at, share_file, sync_file
from .manifest import FileEntry, raw_checksum
from .plan import MAX_SLICE_BYTES, PlannedSlice
from .scanning import scan
from .types import ITEMSIZE, FileExtent, Interval
from .writer import WrittenSlice

_COPY_BYTES = 2 * MAX_SLICE_BYTES


@dataclass(frozen=True)
class FileSlice:
    """A planned slice of an interval whose data lies in a file."""

    piece: PlannedSlice
    interval: Interval
    extent: FileExtent

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.interval.dtype]

    @property
    def begin(self) -> int:
        """The byte of the file at which the slice begins."""
        return self.extent.file_offset_bytes + (self.piece.offset - self.interval.offset) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return self.piece.length * self.itemsize

    @property
    def is_whole(self) -> bool:
        """Return whether the slice is all of the extent."""
        return self.nbytes == self.extent.nbytes

    @property
    def where(self) -> str:
        """The interval and its file, for error messages."""
        return f"{self.interval.name!r} ({self.interval.kind}) in {self.extent.path}"

    def split(self, nbytes: int) -> Iterator[FileSlice]:
        """Yield the slice in consecutive parts of at most `nbytes` bytes each."""
        step, end = nbytes // self.itemsize, self.piece.offset + self.piece.length
        for offset in range(self.piece.offset, end, step):
            yield replace(self, piece=replace(self.piece, offset=offset, length=min(step, end - offset)))


def link_files(
    directory: Path, rank: int, file_slices: Sequence[FileSlice]
) -> tuple[list[FileEntry], list[WrittenSlice], list[FileSlice]]:
    """Link each file that `file_slices` lie in into `directory` and wait until the content is on disk.

    Returns (manifest entries of the links, their slices, those of `file_slices` whose file can be neither linked nor
    cloned, which the caller has to copy). `rank` is in the names of the links. Raises OSError naming the file,
    CheckpointError when two slices share bytes or an extent is not in its file, and DamagedError when the bytes that
    have to be read are damaged.
    """
    files: list[FileEntry] = []
    slices: list[WrittenSlice] = []
    left: list[FileSlice] = []
    by_file: dict[Path, list[FileSlice]] = {}
    for file_slice in file_slices:
        by_file.setdefault(Path(file_slice.extent.path), []).append(file_slice)
    for source, members in by_file.items():
        target = directory / f"rank-{rank:05d}-{len(files):04d}.extents"
        members.sort(key=lambda file_slice: file_slice.begin)
        _require_disjoint(source, members)
        if share_file(source, target):
            entry, own = _file_entry(target, members, len(files))
            files.append(entry)
            slices += own
        else:
            left += members
    for entry in files:
        sync_file(directory / entry.path)
    return files, slices, left


def _require_disjoint(source: Path, members: Sequence[FileSlice]) -> None:
    """Raise CheckpointError unless the extents of `members` lie inside the file `source` and no two of the slices share
    a byte.

    `members` are the slices of that file, sorted by their first byte.
    """
    nbytes, end, before = source.stat().st_size, 0, ""
    for file_slice in members:
        extent = file_slice.extent
        if extent.file_offset_bytes + extent.nbytes > nbytes:
            raise CheckpointError(
                f"{file_slice.where}: bytes {extent.file_offset_bytes} to {extent.file_offset_bytes + extent.nbytes} "
                f"are outside of the file, which has {nbytes}"
            )
        if file_slice.begin < end:
            raise CheckpointError(f"{file_slice.where}: byte {file_slice.begin} is given to {before} as well")
        end, before = file_slice.begin + file_slice.nbytes, file_slice.where


def _file_entry(path: Path, members: Sequence[FileSlice], number: int) -> tuple[FileEntry, list[WrittenSlice]]:
    """Return (manifest entry, slices) of a linked file, reading the bytes that have no checksum yet.

    `members` are the slices of the file `path`, sorted by their first byte; `number` is the file's among the rank's
    own. Raises DamagedError when the file cannot be read or the checksum of an extent does not hold.
    """
    slices: list[WrittenSlice] = []
    extents: list[tuple[int, str]] = []
    nbytes, position = path.stat().st_size, 0
    for file_slice in (part for member in members for part in _checksummed_slices(member)):
        if file_slice.begin > position:
            extents.append((file_slice.begin - position, scan(path, position, file_slice.begin - position, str(path))))
        digest = file_slice.extent.checksum or scan(path, file_slice.begin, file_slice.nbytes, file_slice.where)
        extents.append((file_slice.nbytes, digest))
        piece = file_slice.piece
        slices.append(WrittenSlice(piece.index, "", piece.offset, piece.length, digest, number, file_slice.begin))
        position = file_slice.begin + file_slice.nbytes
    if position < nbytes:
        extents.append((nbytes - position, scan(path, position, nbytes - position, str(path))))
    entry = FileEntry(path.name, nbytes, raw_checksum(extents), 0, checksum(b""), tuple(extents))
    return entry, slices


def _checksummed_slices(file_slice: FileSlice) -> Iterable[FileSlice]:
    """Return the slices under which a linked slice is to be stored: itself if it is a whole extent with a checksum,
    else consecutive parts of at most `MAX_SLICE_BYTES`, whose checksums are still to be computed.

    If the slice is only part of an extent with a checksum, that extent is read and verified; raises DamagedError if it
    is damaged.
    """
    trusted = _with_usable_checksum(file_slice)
    return [trusted] if trusted.extent.checksum is not None else trusted.split(MAX_SLICE_BYTES)


def _require_checksum(file_slice: FileSlice, found: str) -> None:
    """Raise DamagedError unless `found`, a checksum that was computed, is the one that came with the slice's extent."""
    if found != file_slice.extent.checksum:
        raise DamagedError(
            f"{file_slice.where}: the extent at byte {file_slice.extent.file_offset_bytes} is damaged "
            f"(checksum {found}, expected {file_slice.extent.checksum})"
        )


class Copying:
    """Reads slices of files that cannot be linked. Its `intervals` have data functions that return the slices' bytes;
    call these in order, each once.

    Each part is read while the one before is written, past the page cache where the `nvme` extra is installed. The
    bytes that a function returns are valid until the next one is called: two buffers of 16 MiB are all the memory that
    is used. A function raises DamagedError when its bytes cannot be read, or when it completes an extent with another
    checksum than `FileExtent` says. `file_slices`: what to read, in this order. `indices` has, for each of `intervals`,
    the position in the rank's list of the interval that it came from. Close the object after use.
    """

    def __init__(self, file_slices: Iterable[FileSlice]) -> None:
        parts = [part for file_slice in file_slices for part in _with_usable_checksum(file_slice).split(_COPY_BYTES)]
        size = max((part.nbytes for part in parts), default=1)
        buffers = [memoryview(mmap(-1, size)) for _ in range(min(2, len(parts)))]  # on page boundaries
        ranges = [
            (Path(part.extent.path), part.begin, buffers[number % 2][: part.nbytes])
            for number, part in enumerate(parts)
        ]
        self._views = (view for _, _, view in ranges)
        self._reads = read_ranges(ranges, in_flight=2) if has_direct() and ranges else _read_ahead(ranges)
        self._running = Checksummer()
        self.indices = [part.piece.index for part in parts]
        self.intervals = [
            replace(
                part.interval, offset=part.piece.offset, length=part.piece.length, data=partial(self._next_part, part)
            )
            for part in parts
        ]

    def close(self) -> None:
        """Stop reading; the data functions of `intervals` must not be called any more, and their buffers are no longer
        needed."""
        self._reads.close()

    def _next_part(self, part: FileSlice) -> memoryview:
        """Return the bytes of `part`, the part that follows the one returned before; they are valid until the next
        call.

        Raises DamagedError when they cannot be read, or when they complete an extent whose checksum is another one.
        """
        try:
            next(self._reads)
        except OSError as error:
            raise DamagedError(f"{part.where}: reading at byte {part.begin}: {error}") from error
        view, extent = next(self._views), part.extent
        if extent.checksum is not None:
            if part.begin == extent.file_offset_bytes:
                self._running = Checksummer()
            self._running.update(view)
            if part.begin + part.nbytes == extent.file_offset_bytes + extent.nbytes:
                _require_checksum(part, self._running.result())
        return view


def _with_usable_checksum(file_slice: FileSlice) -> FileSlice:
    """Return the slice; if it is only part of an extent with a checksum, verify that extent by reading it and return
    the slice without a checksum.

    Raises DamagedError if the extent's bytes have another checksum.
    """
    if file_slice.extent.checksum is None or file_slice.is_whole:
        return file_slice
    extent = file_slice.extent
    _require_checksum(file_slice, scan(Path(extent.path), extent.file_offset_bytes, extent.nbytes, file_slice.where))
    return replace(file_slice, extent=replace(extent, checksum=None))


def _read_ahead(ranges: Sequence[tuple[Path, int, memoryview]]) -> Generator[None, None, None]:
    """Fill the buffer of each range (file, first byte, buffer) with ordinary reads, and yield once per filled buffer,
    while a thread reads the next one.

    Raises DamagedError when a range cannot be read.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="zero-ckpt-read-ahead") as pool:
        ahead = [pool.submit(read_at, path, begin, view, str(path)) for path, begin, view in ranges[:1]]
        for path, begin, view in ranges[1:]:
            ahead.pop().result()
            ahead.append(pool.submit(read_at, path, begin, view, str(path)))
            yield
        for last in ahead:
            last.result()
            yield
