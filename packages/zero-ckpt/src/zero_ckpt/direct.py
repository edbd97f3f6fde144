"""Direct I/O through zero-nvme-aio: the only file that uses that package, and the choice whether to."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .dry_run import DryRunSink, current_dry_run
from .errors import CheckpointError
from .snapshot import Copy, copy_nothing, move_memory
from .writer import BufferedSink, FileSink, OpenSink

_DIRECT_BYTES = 4 << 20
_DIRECT_READ_BYTES = 64 << 20
_PENDING_READS = 32
_BATCH_BYTES = 32 << 20
_PENDING_BYTES = 256 << 20


class Request(Protocol):
    """A transfer under way, as `zero_nvme_aio` returns it. Named as the class there, which satisfies this protocol."""

    @property
    def checksum(self) -> str | None:
        """The checksum of the bytes moved; None until the transfer has ended, or if none was requested."""
        ...

    def wait(self) -> int:
        """Block until the transfer has ended, and return the bytes moved. Raises OSError if it failed."""
        ...


class IoEngine(Protocol):
    """The methods of `zero_nvme_aio.Engine` that are used here, documented there."""

    def open(self, path: str, mode: str) -> Any:
        """Open a file to read (mode "r") or to write anew ("w"), and return a file object for the other methods; the
        caller closes it."""
        ...

    def write(self, file: Any, data: list[memoryview], offset: int) -> Request:
        """Start writing ``data``, one after the other, from byte ``offset`` on; it must not change until the request
        has ended."""
        ...

    def read(self, file: Any, out: memoryview, offset: int, *, checksum: bool) -> Request:
        """Start filling ``out`` from byte ``offset`` on; the bytes are there when the request has ended."""
        ...

    def sync(self, file: Any) -> None:
        """Block until all writes to the file that were started are on disk."""
        ...

    def close(self) -> None:
        """Finish what was started, and end the threads."""
        ...


def default_sink() -> OpenSink:
    """Return the class `DirectSink` when the `nvme` extra is installed, otherwise `BufferedSink`."""
    return DirectSink if find_spec("zero_nvme_aio") is not None else BufferedSink


def default_copy() -> Copy:
    """Return the function that copies snapshots: with the `nvme` extra one that bypasses the processor's caches.

    Training uses those caches meanwhile. Without the extra, or with an early version of it, it is `memmove`. In a
    dry run (see `zero_ckpt.dry_run`) it does nothing.
    """
    if current_dry_run() is not None:
        return copy_nothing
    if find_spec("zero_nvme_aio") is None:
        return move_memory
    import zero_nvme_aio

    past_caches: Copy = getattr(zero_nvme_aio, "copy_memories", move_memory)
    return past_caches


def open_engine(path: Path) -> IoEngine:
    """Return a new I/O engine tuned for the device of `path`, for the caller to close.

    Raises CheckpointError without the `nvme` extra.
    """
    try:
        import zero_nvme_aio
    except ModuleNotFoundError as error:
        raise CheckpointError("direct I/O needs zero-nvme-aio: pip install zero-ckpt[nvme]") from error
    engine: IoEngine = zero_nvme_aio.Engine.for_path(os.fspath(path))
    return engine


class DirectSink:
    """A `FileSink` that writes the file `path` past the page cache, with many requests in flight; `nbytes` is not used.

    Raises CheckpointError without the `nvme` extra.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._engine = open_engine(path.parent)
        self._file = self._engine.open(os.fspath(path), "w")
        self._batch: list[memoryview] = []
        self._batched = self._position = self._pending = 0
        self._requests: deque[tuple[Request, int]] = deque()

    def write(self, data: memoryview) -> None:
        """Take the next bytes of the file; they are submitted in batches of 32 MiB, and this waits while more than 256
        MiB are in flight.

        `data` must stay as it is until `drain` or `finish` returns. Raises OSError of this or an earlier transfer.
        """
        self._batch.append(data)
        self._batched += data.nbytes
        if self._batched >= _BATCH_BYTES:
            self._submit()

    def drain(self) -> None:
        """Wait until the memory of everything written so far may be reused. Raises OSError of a transfer."""
        self._submit()
        while self._requests:
            self._wait_one()

    def finish(self) -> None:
        """Wait until the whole file is on disk, and close it. Raises OSError of a transfer; the file is closed then,
        too.
        """
        try:
            self.drain()
            self._engine.sync(self._file)
        finally:
            self._file.close()
            self._engine.close()

    def abort(self) -> None:
        """Close the file; transfers that were submitted are finished first, the others are dropped."""
        self._file.close()
        self._engine.close()

    def _submit(self) -> None:
        """Start writing the bytes taken so far, if there are any, and wait while more than 256 MiB are in flight.
        Raises OSError of a transfer.
        """
        if not self._batched:
            return
        request = self._engine.write(self._file, self._batch, self._position)
        self._requests.append((request, self._batched))
        self._position += self._batched
        self._pending += self._batched
        self._batch, self._batched = [], 0
        while self._pending > _PENDING_BYTES:
            self._wait_one()

    def _wait_one(self) -> None:
        """Wait for the oldest transfer in flight. Raises OSError if it failed."""
        request, nbytes = self._requests.popleft()
        self._pending -= nbytes
        request.wait()


def has_direct() -> bool:
    """Return whether the `nvme` extra is installed."""
    return default_sink() is DirectSink


def has_direct_reads(nbytes: int) -> bool:
    """Return whether reads of `nbytes` bytes in all should bypass the page cache: if they are 64 MiB or more and the
    `nvme` extra is installed."""
    return nbytes >= _DIRECT_READ_BYTES and has_direct()


def read_ranges(
    ranges: Sequence[tuple[Path, int, memoryview]], in_flight: int = _PENDING_READS, *, near: Path | None = None
) -> Generator[str, None, None]:
    """Fill the buffer of each range (file, first byte, buffer) by direct I/O, and yield the checksums of the buffers,
    in order.

    A checksum is yielded when its buffer is full. `in_flight` reads are under way at a time, including the one whose
    checksum is yielded next; buffers of later ranges may be partly filled by then. `near` is a path on the files'
    device, by default the first file. `ranges` must not be empty. Raises OSError when a read fails, and CheckpointError
    without the `nvme` extra.
    """
    files: dict[Path, Any] = {}
    pending: deque[Request] = deque()
    engine = open_engine(near or ranges[0][0])
    try:
        for path, begin, view in ranges:
            if path not in files:
                files[path] = engine.open(os.fspath(path), "r")
            pending.append(engine.read(files[path], view, begin, checksum=True))
            if len(pending) >= in_flight:
                yield _wait_for_checksum(pending.popleft())
        while pending:
            yield _wait_for_checksum(pending.popleft())
    finally:
        engine.close()
        for file in files.values():
            file.close()


def _wait_for_checksum(request: Request) -> str:
    """Wait for a transfer and return the checksum of its bytes; empty if none was requested. Raises OSError if it
    failed."""
    request.wait()
    return request.checksum or ""


def make_sink(path: Path, nbytes: int) -> FileSink:
    """Create a file of `nbytes` bytes at `path` and return the sink that writes its content; the default for
    `open_sink`.

    Files below 4 MiB are written through the page cache, as an engine would not pay off. In a dry run (see
    `zero_ckpt.dry_run`) the sink writes no content.
    """
    if current_dry_run() is not None:
        return DryRunSink(path, nbytes)
    return default_sink()(path, nbytes) if nbytes >= _DIRECT_BYTES else BufferedSink(path, nbytes)
