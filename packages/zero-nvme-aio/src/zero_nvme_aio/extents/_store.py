"""The store: writes go to the open generation, reads come from the newest generation that holds the bytes.

A generation is the files written between two calls of `seal`; the last one is open until it is sealed. A stripe is the
number of a path, from 0.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from types import TracebackType
from typing import Any

from .. import _buffers, _header
from .._engine import Engine
from .._memory import AlignedBuffer
from ..errors import ClosedError, ExtentError
from . import _carrying, _container, _reading, _sealing
from ._files import GenerationFiles, StoreFolders
from ._generation import Extent, Generation
from ._history import History
from ._index import SealedIndex
from ._loading import load_sealed
from ._paths import PathUse, StorePaths
from ._ranges import Allocation, Allocator, Covered, WrittenRange, cover, overlay
from ._request import StoreRequest
from ._under_way import RequestsUnderWay
from ._writing import Writing

__all__ = ["ExtentStore", "StoreRequest"]

PathLike = str | os.PathLike[str]


class ExtentStore:
    """Named byte extents in preallocated files under one folder per device, in generations; safe for several threads.

    `paths`: one folder, or several to stripe over in units of `stripe_bytes` (a multiple of 4096), in proportion to
    `weights` (None: evenly; see `measure_paths`). `prefix` begins every file name. `checksums`: record an xxh3_64 per
    write during the transfer (else at `seal`). `verify`: check every read by default. `resume`: continue from the
    sealed generations in the folders; unsealed data of a killed process is removed. `engine`: an engine for the first
    path, whose siblings (`Engine.sibling`) serve the others, or one for each path; None: engines of the store's own.

    A write that fails because its path is full, or does not work, goes to another path, and so do later ones; a path
    that becomes slow gets fewer. `tell` is called with a sentence about each such path, which is called by its entry in
    `names` (None: its folder); without `tell` the sentence is a warning. What is on a path can only be read there, so a
    read that fails is an error.

    Raises ExtentError if a folder already holds a store (and `resume` is false), or a store in use, or if a folder that
    the store had is missing: a drive that is not mounted, or fewer paths than before. Without `resume` that is an error
    only if there are files that may be of a sealed generation; nothing is removed then. FormatError if a generation to
    resume from is damaged, ValueError for arguments out of range.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        engine: Engine | Sequence[Engine] | None = None,
        stripe_bytes: int = 4 << 20,
        prefix: str = "store",
        checksums: bool = True,
        verify: bool = False,
        resume: bool = False,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        folders = [os.fspath(p) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        if not folders:
            raise ValueError("expected at least one path, got none")
        if stripe_bytes <= 0 or stripe_bytes % 4096:
            raise ValueError(f"expected stripe_bytes to be a multiple of 4096, got {stripe_bytes}")
        if not prefix or os.sep in prefix:
            raise ValueError(f"expected prefix to be a file name, got {prefix!r}")
        folders = [os.path.abspath(folder) for folder in folders]
        self._paths = StorePaths(folders, weights, names, tell)
        self._folders = StoreFolders(folders, prefix, self._paths)
        self._stripe_bytes = stripe_bytes
        self._verify = verify
        self._lock = threading.RLock()
        self._writing = Writing(self._paths, self._lock, checksums)
        self._closed = False
        self._bytes_written = 0
        self._declared: dict[str, tuple[int, str]] = {}
        self._live: dict[str, list[Covered]] = {}
        self._history = History(self._folders, self._live, self._lock)
        self._requests = RequestsUnderWay()
        self._allocator: Allocator | None = None
        self._reserved = 0
        self._folders.take(resume)
        try:
            self._engines, self._own_engines = _engines_of(engine, len(folders))
        except BaseException:
            self._folders.give_back()
            raise
        try:
            self._history.adopt(*load_sealed(self._folders, self._engines, self._live))
        except BaseException:
            self._release_engines_and_locks()
            raise

    def declare(self, name: str, nbytes: int, dtype: str = "U8") -> None:
        """Fix the size of a name, in bytes, before it is written, so that it is contiguous on each path.

        A generation in which every name was declared before its first write is sealed as safetensors: `dtype` is the
        element type of its entry (safetensors' spelling), one dimension. Raises ExtentError if the name was declared
        differently, for an unknown dtype, and for bytes that are not whole elements of it.
        """
        bits = _header.ITEM_BITS.get(dtype)
        if bits is None or nbytes < 0 or nbytes * 8 % bits:
            raise ExtentError(
                f"expected '{name}' to have a known dtype and whole elements, got {nbytes} bytes of {dtype}"
            )
        with self._lock:
            self._check_open()
            if self._declared.setdefault(name, (nbytes, dtype)) != (nbytes, dtype):
                raise ExtentError(f"'{name}' is declared with {self._declared[name]}, got ({nbytes}, '{dtype}')")

    def write(self, name: str, data: Any, offset_bytes: int = 0) -> StoreRequest:
        """Start writing `data` into the open generation at `offset_bytes` of `name`; the memory must not change until
        the request is done.

        Waits first for requests under way that touch the same bytes. Raises InvalidBufferError, NoSpaceError (from the
        request), ExtentError if a declared size is exceeded, ClosedError.
        """
        self._paths.say()
        items = _buffers.describe_all(data, False)
        nbytes = sum(map(_buffers.nbytes_of, items))
        with self._lock:
            self._check_open()
            self._check_range(name, offset_bytes, nbytes)
            if nbytes == 0:
                return StoreRequest([], 0, self._paths.say)
            allocator, files = self._open_generation()
            self._requests.wait_for_conflicts(name, offset_bytes, offset_bytes + nbytes, writing=True)
            self._paths.rebalance()
            requests = []
            for allocation in self._allocations_for(allocator, name, offset_bytes, offset_bytes + nbytes):
                part = _buffers.slice_items(items, allocation.begin - offset_bytes, allocation.end - offset_bytes)
                piece, request = self._writing.start(allocator, files, name, allocation, part)
                self._live[name] = overlay(self._live.get(name, []), piece, files.generation)
                self._requests.add(name, allocation.begin, allocation.end, request, writing=True)
                requests.append(request)
            self._bytes_written += nbytes
        return StoreRequest(requests, nbytes, self._paths.say)

    def read(self, name: str, out: Any, offset_bytes: int = 0, *, verify: bool | None = None) -> StoreRequest:
        """Start filling `out` from `offset_bytes` of `name`, each byte from the newest generation that holds it, and
        return the request.

        Waits first for writes under way to the same bytes. With `verify` (None: as given to the store) the recorded
        checksums are compared in `wait`, which raises ChecksumError; bytes without one are not checked. Raises
        ExtentError for bytes that were never written, the write's own error for bytes whose write failed,
        InvalidBufferError, ClosedError.
        """
        self._paths.say()
        items = _buffers.describe_all(out, True)
        nbytes = sum(map(_buffers.nbytes_of, items))
        with self._lock:
            self._check_open()
            if name not in self._live and nbytes:
                raise ExtentError(f"'{name}' was never written to this store")
            self._check_range(name, offset_bytes, nbytes)
            self._requests.wait_for_conflicts(name, offset_bytes, offset_bytes + nbytes, writing=False)
            found = []
            for piece in cover(self._live.get(name, []), offset_bytes, offset_bytes + nbytes):
                if not isinstance(piece, Covered):
                    raise ExtentError(f"bytes {piece[0]} to {piece[1]} of '{name}' were never written to this store")
                if piece.piece.request is not None:
                    piece.piece.request.wait()
                found.append(piece)
            self._paths.rebalance()
            reading = _reading.Reading(self._paths, self._history.files, self._verify if verify is None else verify)
            for covered in found:
                part = _buffers.slice_items(items, covered.begin - offset_bytes, covered.end - offset_bytes)
                request = reading.start(covered, part)
                self._requests.add(name, covered.begin, covered.end, request, writing=False)
        return StoreRequest(reading.requests, nbytes, self._paths.say, reading.checks)

    def seal(self, *, durable: bool = True) -> Generation:
        """End the open generation and return it: wait for its writes, complete the checksums, make the files read-only,
        and sync them.

        If only part of the state was written into it, the rest is carried over: by sharing blocks where the file system
        can, so that the generation holds the whole state and no bytes move; elsewhere a generation of which less than
        half is current is emptied by a copy (see `carried_bytes`), and others stay beside the new one.

        After this call the generation survives a crash; without `durable` only after its `make_durable`, which does the
        syncing, on any thread, while this store continues. Until then the previous generation stays; the next call does
        it first if nobody has. Raises the first error of a failed write, and ChecksumError for data to be carried over
        that was changed on disk; the generation then stays open, and the data concerned can be written again.
        """
        self._paths.say()
        with self._lock:
            self._check_open()
            self._history.make_last_durable()
            self._settle_all()
            allocator, files = self._open_generation()
            self._carry_over(allocator, files)
            pieces, sealed = self._end_generation(allocator, files)
            sync = _sealing.GenerationSync(self._engines, self._folders, files.generation, files.opened, sealed)
            if durable:
                sync.run()
            generation = self._history.add_sealed(sync, pieces, sealed.keys, sealed.kind)
            self._allocator = None
            self._paths.try_full_again()
            if durable:
                self._history.note_durable(sync)
            return generation

    def extents(self) -> Mapping[str, tuple[Extent, ...]]:
        """Return the current state: the extents of every name, over all generations, in order of offset. It is a copy;
        later writes do not change it.

        Of a partly overwritten extent only the current range is listed, without a checksum. Raises ClosedError after
        `close`.
        """
        with self._lock:
            self._check_open()
            return {name: tuple(map(self._history.extent, covered)) for name, covered in self._live.items()}

    def flush(self) -> None:
        """Wait for all submitted requests; raise the first write that failed and whose bytes were not written again.
        ClosedError after `close`.
        """
        with self._lock:
            self._check_open()
            self._settle_all()
        self._paths.say()

    def carried_bytes(self) -> int:
        """Return the bytes that `seal` would copy now from older generations, which needs as much free space; 0 if
        nothing was written since the last seal. Raises ClosedError after `close`.
        """
        with self._lock:
            self._check_open()
            if not self._written_since_seal():
                return 0
            history = self._history
            return _carrying.carried_bytes(self._live, history.files, history.open_number, self._folders.shares_blocks)

    def bytes_written(self) -> int:
        """Return the bytes passed to `write` and copied by `seal` so far."""
        return self._bytes_written

    def former_paths(self) -> list[str]:
        """Return the folders that the store with this prefix had earlier, beside one of its present paths, and where
        files of it may be left.
        """
        return sorted(self._folders.former)

    def path_use(self) -> tuple[PathUse, ...]:
        """Return a `PathUse` for each path, in order: its folder, name and state, the bytes written and read so far,
        its speed, and its share of the bytes written from now on.
        """
        with self._lock:
            return self._paths.path_use()

    def close(self, *, remove: bool) -> None:
        """Wait for requests under way and close. With `remove` every file is deleted; otherwise the sealed generations
        stay for `resume`, and unsealed data is deleted. Hard links elsewhere are untouched. May be called twice.

        Without `remove` it syncs a generation that was sealed without `durable`; if that fails it raises the error, and
        the store stays open.
        """
        with self._lock:
            if self._closed:
                return
            self._history.close(remove=remove)
            self._closed = True
            self._folders.forget_if_empty()
            self._release_engines_and_locks()
        self._paths.say()

    def __enter__(self) -> ExtentStore:
        """Return this store, for `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call `close(remove=False)`, also after an error in the block: sealed generations stay, unsealed data is
        deleted. Raises as `close` does.
        """
        self.close(remove=False)

    def _open_generation(self) -> tuple[Allocator, GenerationFiles]:
        """Return the allocator (which gives out file space) and the files of the open generation; the caller holds the
        lock. On the first call after a seal they are made, with room for a header if names were declared.
        """
        if self._allocator is None:
            stripes = len(self._folders.paths)
            start = _container.reserve_for(self._declared, stripes, self._stripe_bytes) if self._declared else 0
            self._reserved = start
            self._allocator = Allocator(self._paths, self._stripe_bytes, start)
            files = GenerationFiles(self._engines, self._folders, self._history.open_number, start)
            self._history.files[files.generation] = files
        return self._allocator, self._history.files[self._history.open_number]

    def _allocations_for(
        self, allocator: Allocator, name: str, begin: int, end: int, avoided: Set[int] = frozenset()
    ) -> list[Allocation]:
        """Return the file space in the open generation for bytes [begin, end) of a name: what they have there, else,
        and instead of space on an `avoided` stripe, new space. A declared name gets space for all its bytes at once.
        """
        if name in self._declared:
            allocator.reserve(name, self._declared[name][0])
        return allocator.allocate(name, begin, end, avoided)

    def _written_since_seal(self) -> bool:
        """Return whether any current bytes are in the open generation."""
        return any(c.piece.generation == self._history.open_number for covered in self._live.values() for c in covered)

    def _carry_over(self, allocator: Allocator, files: GenerationFiles) -> None:
        """Carry the current data of older generations over into the open one, whose `allocator` and `files` these are,
        by sharing blocks or by a copy; do nothing if nothing was written since the last seal. If a path fails, begin
        again without it; raise the error if no path is left.
        """
        avoided: set[int] = set()
        while self._written_since_seal():
            carrying = _carrying.Carrying(
                self._history.files,
                files,
                lambda name, begin, end: self._allocations_for(allocator, name, begin, end, avoided),
                self._folders.shares_blocks,
            )
            try:
                carried = carrying.run(self._live)
            except OSError as error:
                avoided.add(self._writing.leave_path_of(files, error))
                continue
            for piece in carried:
                self._live[piece.name] = overlay(self._live[piece.name], piece, files.generation)
            self._bytes_written += carrying.copied_bytes
            return

    def _end_generation(self, allocator: Allocator, files: GenerationFiles) -> tuple[list[WrittenRange], SealedIndex]:
        """Complete the `files` of the open generation, whose space `allocator` has given out; return its ranges and its
        index, which is not written yet. Data on failed paths is first read back and written to the others.
        """
        while True:
            open_ranges = [c for cs in self._live.values() for c in cs if c.piece.generation == files.generation]
            lost = next((c for c in open_ranges if self._paths.has_failed(c.piece.stripe)), None)
            if lost is not None and self._paths.any_usable:
                scratch = AlignedBuffer(lost.end - lost.begin)
                self.read(lost.piece.name, scratch, lost.begin, verify=True).wait()
                self.write(lost.piece.name, scratch, lost.begin).wait()
                continue
            pieces = [covered.piece for covered in open_ranges]
            try:
                return pieces, _sealing.seal_files(
                    self._folders, files, allocator, pieces, self._declared, self._reserved
                )
            except OSError as error:
                if not self._paths.has_failed(self._writing.leave_path_of(files, error)):
                    raise  # full, although every file has the space of its header

    def _check_range(self, name: str, offset: int, nbytes: int) -> None:
        """Raise ExtentError if bytes [offset, offset + nbytes) of a name begin below 0 or exceed the name's declared
        size.
        """
        limit = self._declared[name][0] if name in self._declared else 2**62
        if offset < 0 or offset + nbytes > limit:
            raise ExtentError(
                f"bytes {offset} to {offset + nbytes} are outside of '{name}', which has {limit} bytes",
                offset=offset,
                expected=limit,
                got=offset + nbytes,
            )

    def _release_engines_and_locks(self) -> None:
        """Close the engines that are the store's own, and release its locks."""
        for engine in self._own_engines:
            engine.close()
        self._folders.give_back()

    def _settle_all(self) -> None:
        """Wait for all submitted requests; raise the first error of a write whose bytes were not written again."""
        self._requests.settle_all()
        for covered in self._live.values():
            for entry in covered:
                if entry.piece.request is not None:
                    entry.piece.request.wait()

    def _check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the extent store is closed")


def _engines_of(given: Engine | Sequence[Engine] | None, paths: int) -> tuple[list[Engine], list[Engine]]:
    """Return (an engine for each path of a store, by stripe; those among them that the store must close). `given`: an
    engine for each path, or the first, whose siblings the others are, or None. ValueError for another number than
    `paths`.
    """
    if isinstance(given, Sequence):
        if len(given) != paths:
            raise ValueError(f"expected an engine for each of {paths} paths, got {len(given)}")
        return list(given), []
    first = Engine() if given is None else given
    engines = [first, *(first.sibling() for _ in range(paths - 1))]
    return engines, [engine for engine in engines if engine is not given]
