"""Read any interval of any tensor of a checkpoint, touching only the bytes that are needed.

[Note: verified partial reads]
A slice is the unit of checksumming and never larger than `MAX_SLICE_BYTES` when written by this package. A request that
covers a slice reads it straight into the caller's memory and verifies it there. A request that covers part of a slice
reads the whole slice into a scratch buffer, verifies it, and copies the part: at most two slices per request. Requests
that are made together and need the same slice share one read of it. Slices of linked files may be larger; the first
request for a part of one reads it in small pieces to verify it, and from then on its parts are read without verifying.
With `verify=False` only the requested bytes are read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checksum import checksum
from .direct import has_direct_reads, read_ranges
from .errors import DamagedError, MismatchError, NotFoundError
from .headers import read_entries
from .manifest import Manifest, Slice, TensorEntry
from .opened import Folder, read_fd
from .plan import MAX_SLICE_BYTES
from .safetensors_file import HeaderEntry
from .scanning import scan_fd
from .types import ITEMSIZE

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OPEN_FILES = 64


@dataclass(frozen=True)
class OpenReport:
    """The checkpoint that was opened: `opened` is its tag, `requested` the tag that was asked for, None for the newest.

    `skipped` lists those that were passed over for it, as (tag, problem).
    """

    requested: str | None
    opened: str
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Return the report as one line for a log."""
        lines = [f"opened checkpoint {self.opened!r}"]
        lines += [f"  instead of {tag!r}: {problem}" for tag, problem in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True)
class ReadRequest:
    """Fill `out` with elements of tensor (`name`, `kind`) from flat element `offset` on, as many as it has room for."""

    name: str
    kind: str
    offset: int
    out: Buffer


class Checkpoint:
    """A complete checkpoint, opened for reading; make one with `open_checkpoint`. Safe to use from several threads.

    It reads the files of the directory that was opened, even if a save replaces the checkpoint of this tag meanwhile;
    once those files are gone, reading raises ReplacedError. `path` is that directory and `tag` its name; `report` says
    which checkpoints were passed over. `manifest`: what the checkpoint holds. `folder`: its directory, opened.
    """

    def __init__(self, path: Path, tag: str, manifest: Manifest, report: OpenReport, folder: Folder) -> None:
        self.path, self.tag, self.report = path, tag, report
        self._manifest, self._folder = manifest, folder
        self._tensors = {(tensor.name, tensor.kind): tensor for tensor in manifest.tensors}
        self._headers: dict[int, dict[str, HeaderEntry]] = {}
        self._lock = threading.Lock()
        self._large: set[tuple[int, str, int | None]] = set()
        self._large_lock = threading.Lock()

    @property
    def step(self) -> int:
        """Optimizer steps taken when it was saved."""
        return self._manifest.step

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self._manifest.world_size

    @property
    def tensors(self) -> Mapping[tuple[str, str], TensorEntry]:
        """Every logical tensor by (name, kind). It is the checkpoint's own mapping."""
        return self._tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        """The names of tied tensors, each mapped to the name under which it is stored."""
        return self._manifest.aliases

    @property
    def frozen(self) -> frozenset[str] | None:
        """The names of parameters that were not trained; None where the saver did not say."""
        return self._manifest.frozen

    @property
    def client_state(self) -> Any:
        """The `client_state` that the saver passed."""
        return self._manifest.client_state

    @property
    def config(self) -> Any:
        """The `config` that the saver passed."""
        return self._manifest.config

    @property
    def rank_state(self) -> Sequence[Any]:
        """The `rank_state` that each saving rank passed, by rank; empty when none passed any."""
        return self._manifest.rank_state

    @property
    def manifest(self) -> Manifest:
        """The decoded manifest."""
        return self._manifest

    @property
    def fingerprint(self) -> str:
        """Text that differs when the contents do: the checksum of the manifest, which holds those of all tensors."""
        return checksum(self._manifest.encode())

    def cuts(self, name: str, kind: str) -> list[int]:
        """Return the flat elements at which a tensor's slices begin, ascending; reads that begin and end there touch
        each byte once.

        `name` may be an alias. Raises NotFoundError when there is no such tensor.
        """
        return [piece.offset for piece in self.entry(name, kind).slices]

    def entry(self, name: str, kind: str) -> TensorEntry:
        """Return the manifest's entry of tensor (`name`, `kind`); `name` may be an alias. Raises NotFoundError when
        there is no such tensor."""
        found = self._tensors.get((name, kind)) or self._tensors.get((self.aliases.get(name, name), kind))
        if found is None:
            raise NotFoundError(f"{self.path} has no tensor {name!r} of kind {kind!r}")
        return found

    def read_into(self, name: str, kind: str, offset: int, out: Buffer, *, verify: bool = True) -> None:
        """Fill `out` with elements of a tensor from flat element `offset` on, in the stored dtype.

        `out` is a writable C-contiguous buffer; its size decides how many elements are read. `name` may be an alias.
        Without `verify`, bytes are not compared with their checksums. Raises NotFoundError, MismatchError when `out` is
        not writable and contiguous or not whole elements inside the tensor, DamagedError naming tensor and file, and
        ReplacedError.
        """
        for job in self._slice_copies(ReadRequest(name, kind, offset, out)):
            self._copy_from_slice([job], verify)

    def read_many(self, requests: Iterable[ReadRequest], *, verify: bool = True, threads: int = 4) -> None:
        """Fill the buffers of many requests as `read_into` does, with several reads in flight. Raises as `read_into`
        does.

        Up to `threads` threads read. With the `nvme` extra, if 64 MiB or more are requested and `verify` is set, whole
        slices are read past the page cache instead. After an exception the buffers may be partly filled.
        """
        jobs = [job for request in requests for job in self._slice_copies(request)]
        if verify and has_direct_reads(sum(job.view.nbytes for job in jobs)):
            jobs = self._read_whole_slices(jobs)
        by_slice: dict[tuple[int, str, int | None], list[SliceCopy]] = {}
        for job in jobs:
            by_slice.setdefault((job.piece.file, job.piece.key, job.piece.begin), []).append(job)
        if threads <= 1 or len(by_slice) <= 1:
            for group in by_slice.values():
                self._copy_from_slice(group, verify)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="zero-ckpt-read") as pool:
            futures = [pool.submit(self._copy_from_slice, group, verify) for group in by_slice.values()]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _read_whole_slices(self, jobs: list[SliceCopy]) -> list[SliceCopy]:
        """Read with direct I/O those of `jobs` that want whole slices, 64 files at a time, and return the other jobs.
        Raises DamagedError when a slice cannot be read or its checksum differs."""
        whole = sorted((job for job in jobs if job.is_whole), key=lambda job: job.piece.file)
        by_file = [list(group) for _, group in groupby(whole, key=lambda job: job.piece.file)]
        for first in range(0, len(by_file), _OPEN_FILES):
            self._read_directly([job for group in by_file[first : first + _OPEN_FILES] for job in group])
        return [job for job in jobs if not job.is_whole]

    def _read_directly(self, jobs: list[SliceCopy]) -> None:
        """Fill the views of `jobs`, which all want whole slices, with direct I/O, and compare the checksums. Raises
        DamagedError when a slice cannot be read or its checksum differs."""
        with ExitStack() as stack:
            opened: dict[int, Path] = {}
            for job in jobs:
                if job.piece.file not in opened:
                    fd = stack.enter_context(self._opened(job))
                    opened[job.piece.file] = Path(f"/proc/self/fd/{fd}")
            ranges = [(opened[job.piece.file], self._begin(job), job.view) for job in jobs]
            try:
                with closing(read_ranges(ranges, near=self.path)) as checksums:
                    for job, found in zip(jobs, checksums, strict=True):
                        self._require_checksum(job, found)
            except OSError as error:
                raise DamagedError(f"{self.path}: {error}") from error

    def read(self, name: str, kind: str, offset: int = 0, length: int | None = None) -> bytearray:
        """Return the verified bytes of `length` elements from flat element `offset` on, by default of the full tensor.

        Raises as `read_into` does, MismatchError for an interval that is not inside the tensor.
        """
        entry = self.entry(name, kind)
        count = entry.numel - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > entry.numel:
            raise MismatchError(f"{name!r} ({kind}): elements {offset} to {offset + count} of {entry.numel}")
        out = bytearray(count * ITEMSIZE[entry.dtype])
        self.read_into(name, kind, offset, out)
        return out

    def _slice_copies(self, request: ReadRequest) -> list[SliceCopy]:
        """Return one copy for each slice that a request overlaps, into its part of the request's buffer. Raises
        NotFoundError, and MismatchError when the request does not fit the tensor."""
        entry = self.entry(request.name, request.kind)
        itemsize = ITEMSIZE[entry.dtype]
        out = _writable_bytes(request)
        length, rest = divmod(out.nbytes, itemsize)
        begin, end = request.offset, request.offset + length
        if rest or begin < 0 or end > entry.numel:
            raise MismatchError(
                f"{request.name!r} ({request.kind}) has {entry.numel} elements of {entry.dtype}; "
                f"{out.nbytes} bytes from element {begin} on are not an interval of it"
            )
        jobs = []
        for piece in _overlapping(entry.slices, begin, end):
            low, high = max(begin, piece.offset), min(end, piece.offset + piece.length)
            view = out[(low - begin) * itemsize : (high - begin) * itemsize]
            jobs.append(SliceCopy(entry, piece, (low - piece.offset) * itemsize, view))
        return jobs

    def _copy_from_slice(self, jobs: Sequence[SliceCopy], verify: bool) -> None:
        """Fill the views of `jobs`, which all want bytes of the same slice. With `verify` the slice is read once, in
        full, and compared with its checksum.

        A slice of more than `MAX_SLICE_BYTES` of which parts are wanted is verified once per checkpoint object. Raises
        DamagedError, or ReplacedError when the file is gone. Threads call this at the same time for different slices.
        """
        first = jobs[0]
        begin, where = self._begin(first), self._where(first)
        with self._opened(first) as fd:
            if verify and first.slice_nbytes > MAX_SLICE_BYTES and not all(job.is_whole for job in jobs):
                self._verify_large(first, fd, begin, where)
                verify = False
            if not verify:
                for job in jobs:
                    read_fd(fd, begin + job.skip, job.view, where)
                return
            whole = first.view if first.is_whole else memoryview(bytearray(first.slice_nbytes))
            read_fd(fd, begin, whole, where)
        self._require_checksum(first, checksum(whole))
        for job in jobs:
            if job.view is not whole:
                job.view[:] = whole[job.skip : job.skip + job.view.nbytes]

    def _verify_large(self, job: SliceCopy, fd: int, begin: int, where: str) -> None:
        """Compare a slice of more than `MAX_SLICE_BYTES` with its checksum, unless an earlier request did. Raises
        DamagedError.

        `job` wants a part of the slice; `fd` is the slice's file, `begin` the slice's first byte there; `where` begins
        errors.
        """
        place = (job.piece.file, job.piece.key, job.piece.begin)
        with self._large_lock:
            if place not in self._large:
                self._require_checksum(job, scan_fd(fd, begin, job.slice_nbytes, where))
                self._large.add(place)

    def _opened(self, job: SliceCopy) -> AbstractContextManager[int]:
        """Return a context manager that opens the file of a job's slice, yields its descriptor and closes it. Entering
        raises DamagedError or ReplacedError when the file cannot be opened."""
        return self._folder.opened(self._manifest.files[job.piece.file].path, self._where(job))

    def _require_checksum(self, job: SliceCopy, found: str) -> None:
        """Raise DamagedError unless `found`, a checksum that was computed, is the one that the manifest has for a job's
        slice."""
        if found != job.piece.checksum:
            raise DamagedError(
                f"{self._where(job)}: elements {job.piece.offset} to {job.piece.offset + job.piece.length} are damaged "
                f"(checksum {found}, expected {job.piece.checksum})"
            )

    def _where(self, job: SliceCopy) -> str:
        """Return words for errors: the tensor and the file that a job reads."""
        file = self.path / self._manifest.files[job.piece.file].path
        return f"{job.entry.name!r} ({job.entry.kind}) in {file}"

    def _begin(self, job: SliceCopy) -> int:
        """Return the position in its file of a job's slice, in bytes. Raises DamagedError when the file's header does
        not have it."""
        if job.piece.begin is not None:
            return job.piece.begin
        stored = self._header(job.piece.file).get(job.piece.key)
        if stored is None or stored.dtype != job.entry.dtype or stored.end - stored.begin != job.slice_nbytes:
            raise DamagedError(
                f"{self._where(job)}: the file's header does not hold slice {job.piece.key!r} as the manifest says"
            )
        return stored.begin

    def _header(self, index: int) -> dict[str, HeaderEntry]:
        """Return the header's entries of file number `index` of the manifest, by key. It is read at the first call and
        kept. Raises DamagedError when it cannot be read or is not valid."""
        with self._lock:
            if index not in self._headers:
                entry = self._manifest.files[index]
                self._headers[index] = read_entries(self._folder, entry)
            return self._headers[index]


@dataclass(frozen=True)
class SliceCopy:
    """A job of a read: fill `view` with bytes of the slice `piece`, from its byte `skip` on. `entry` is the slice's
    tensor."""

    entry: TensorEntry
    piece: Slice
    skip: int
    view: memoryview

    @property
    def slice_nbytes(self) -> int:
        """The bytes of the slice."""
        return self.piece.length * ITEMSIZE[self.entry.dtype]

    @property
    def is_whole(self) -> bool:
        """Return whether the job wants all bytes of the slice."""
        return self.view.nbytes == self.slice_nbytes


def _writable_bytes(request: ReadRequest) -> memoryview:
    """Return the request's buffer as a flat view of bytes. Raises MismatchError when it is read-only or not
    contiguous."""
    view = memoryview(request.out)
    if view.readonly or not view.c_contiguous:
        raise MismatchError(
            f"{request.name!r} ({request.kind}): the buffer to read into must be writable and contiguous"
        )
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _overlapping(slices: Sequence[Slice], begin: int, end: int) -> list[Slice]:
    """Return those of `slices`, which are sorted by offset, that have elements from `begin` to `end` (exclusive)."""
    low, high = 0, len(slices)
    while low < high:  # the first slice that ends after `begin`
        middle = (low + high) // 2
        if slices[middle].offset + slices[middle].length <= begin:
            low = middle + 1
        else:
            high = middle
    found = []
    while low < len(slices) and slices[low].offset < end:
        found.append(slices[low])
        low += 1
    return found
