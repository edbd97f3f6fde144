"""The I/O engine, whose native part, in C++, is `_native.Engine`. A described buffer is memory as `_buffers` returns
it: a flat memoryview of bytes, or (address, bytes, owner).
"""

from __future__ import annotations

import os
import threading
import weakref

from . import _buffers, _native
from ._file import File, require_offset
from ._request import NATIVE_CODES, Request
from .errors import (
    AccessError,
    BackendUnavailableError,
    ClosedError,
    InvalidBufferError,
    OpenError,
    open_error,
    transfer_error,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any

    from ._device import DeviceTransfers

__all__ = ["Engine"]

DEFAULT_BLOCK_BYTES = 1 << 20
DEFAULT_QUEUE_DEPTH = 32

_MODES = {"r": (True, False, False, False), "w": (False, True, True, True), "rw": (True, True, True, False)}
_DIRECT: dict[Any, int] = {"auto": 0, False: 1, True: 2}


class Engine:
    """Moves bytes between memory and files on threads of its own; submitting only enqueues. Named as fio names the part
    of it that does this, an I/O engine.

    `backend`: "auto" (io_uring, else libaio, else threads; `probe()` says why), or one of "io_uring", "libaio",
    "threads", "null" by name. `queue_depth`: blocks in flight per progress thread (32). `block_bytes`: bytes per block,
    a multiple of 4096 (1 MiB). `threads`: progress threads (2), or pool threads of the "threads" backend (8). When
    neither depth nor block is given, files on a device that was tuned get what `tune` found there; `for_path` takes its
    backend and threads too. `single_submit` hands blocks over one by one; `overlap_events=False` awaits each batch
    before the next.

    Raises BackendUnavailableError when a backend named does not run here, ValueError for numbers out of range.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        queue_depth: int | None = None,
        block_bytes: int | None = None,
        threads: int | None = None,
        single_submit: bool = False,
        overlap_events: bool = True,
    ) -> None:
        self._build(backend, queue_depth, block_bytes, threads, single_submit, overlap_events, None)

    def _build(
        self,
        backend: str,
        queue_depth: int | None,
        block_bytes: int | None,
        threads: int | None,
        single_submit: bool,
        overlap_events: bool,
        faults: _native.FaultPlan | None,
    ) -> None:
        """Check the settings and start the native engine; the arguments before `faults` are those of the constructor.
        `faults`: what goes wrong in transfers, for tests; None: nothing. BackendUnavailableError when a backend named
        does not run here, ValueError for numbers out of range.
        """
        self._tuned = queue_depth is None and block_bytes is None
        self._settings: dict[str, Any] = {
            "backend": backend,
            "queue_depth": queue_depth,
            "block_bytes": block_bytes,
            "threads": threads,
            "single_submit": single_submit,
            "overlap_events": overlap_events,
        }
        self.queue_depth = _check_range(
            "queue_depth", DEFAULT_QUEUE_DEPTH if queue_depth is None else queue_depth, 1, 4096
        )
        self.block_bytes = _check_block_bytes(
            "block_bytes", DEFAULT_BLOCK_BYTES if block_bytes is None else block_bytes
        )
        count = 0 if threads is None else _check_range("threads", threads, 1, 256)
        try:
            self._native = _native.Engine(
                backend, self.queue_depth, self.block_bytes, count, single_submit, overlap_events, faults
            )
        except OSError as error:
            raise BackendUnavailableError(f"backend '{backend}': {error.args[1]}", errno=error.errno) from None
        self.threads = self._native.threads()
        self._device_transfers: DeviceTransfers | None = None
        self._device_lock = threading.Lock()
        # Runs at garbage collection and at exit, so that what was submitted reaches the file.
        self._finalizer = weakref.finalize(self, self._native.close)

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any], *, backend: str = "auto") -> Engine:
        """Return an engine configured by DeepSpeed's `aio` section.

        `block_size` (bytes), `queue_depth`, `intra_op_parallelism` or `thread_count` (progress threads that share each
        request), `single_submit`, `overlap_events`; absent keys have DeepSpeed's defaults (1 MiB, 8, 1, false, true).
        Raises ValueError for an unknown key, naming the nearest one.
        """
        from ._deepspeed import engine_arguments

        return cls(backend=backend, **engine_arguments(config))

    @classmethod
    def for_path(cls, path: str | os.PathLike[str]) -> Engine:
        """Return an engine with the settings that `tune` stored for the device of `path`; the default settings if it
        was never tuned. If the stored backend does not run here, "auto" takes its place.
        """
        from ._tuning import lookup

        found = lookup(os.fspath(path))
        if found is None:
            return cls()
        depth, block, threads = found.queue_depth, found.block_bytes, found.threads
        try:
            return cls(backend=found.backend, queue_depth=depth, block_bytes=block, threads=threads)
        except BackendUnavailableError:
            # Tuned where more was allowed than here; `probe` says why that backend does not run.
            return cls(queue_depth=depth, block_bytes=block, threads=threads)

    def sibling(self) -> Engine:
        """Return a new engine with the settings of this one, for files on another drive: if several drives share an
        engine, the slowest holds up all. The caller closes it. Engines for tests and dry runs return themselves
        instead.
        """
        return Engine(**self._settings)

    @property
    def backend(self) -> str:
        """Return the name of the backend in use."""
        return self._native.backend()

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._native.closed()

    def open(
        self, path: str | os.PathLike[str], mode: str = "r", *, direct: bool | str = "auto", preallocate: bool = True
    ) -> File:
        """Open a file: "r" (must exist), "w" (created or emptied), "rw" (created if missing, content kept).

        `direct`: "auto" uses direct I/O where the file system reports its alignment, True requires it, False forbids
        it. `preallocate` reserves blocks before a write beyond the end, which extends the file to the end of the
        request at once. Raises MissingPathError, DirectoryPathError, AccessError, OpenError, ClosedError, and
        ValueError for another mode or `direct`.
        """
        if mode not in _MODES:
            raise ValueError(f"expected mode 'r', 'w' or 'rw', got {mode!r}")
        if direct not in _DIRECT:
            raise ValueError(f"expected direct to be 'auto', True or False, got {direct!r}")
        name = os.fspath(path)
        if "\0" in name:
            raise OpenError(f"cannot open {name!r}: a path has no null character", errno=22, path=name)
        self._require_open()
        block_bytes, queue_depth = self._settings_for(name) if self._tuned else (0, 0)
        flags = _MODES[mode]
        try:
            native = self._native.open(
                os.fsencode(name), *flags, _DIRECT[direct], block_bytes, queue_depth, preallocate
            )
        except OSError as error:
            raise open_error(name, error) from None
        return File(native, self._native, name, mode)

    def read(self, file: File, out: Any, offset: int = 0, *, checksum: bool = False) -> Request:
        """Start filling `out` from the file at `offset` (bytes) and return the request; `out` holds the bytes once it
        has ended.

        `out`: a writable C-contiguous buffer, or a list of them, filled one after the other from one file range. A
        torch tensor on an accelerator passes through pinned staging buffers. `checksum`: the request's `checksum` is
        that of the bytes; refused for accelerator tensors. Raises InvalidBufferError, InvalidOffsetError, AccessError,
        ClosedError; the request raises later errors.
        """
        return self._submit(False, file, out, offset, checksum)

    def write(self, file: File, data: Any, offset: int = 0, *, checksum: bool = False) -> Request:
        """Start writing `data` to the file at `offset` (bytes) and return the request; the memory must not change until
        it has ended.

        `data`: a C-contiguous buffer, or a list of them, written one after the other to one file range. `checksum`: the
        request's `checksum` is that of the bytes; refused for accelerator tensors. Raises InvalidBufferError,
        InvalidOffsetError, AccessError, ClosedError; the request raises later errors. When the request is done, the
        device has the bytes, or the page cache of a buffered file; only `sync` makes them survive a crash.
        """
        return self._submit(True, file, data, offset, checksum)

    def sync(self, file: File) -> None:
        """Block until every write submitted to the file before this call is on stable storage.

        Raises the error of a failed write among them, also if its request was never waited for; AccessError for a file
        opened for reading only, ClosedError.
        """
        native = self._native_file_for(file, True)
        device_failure = file.wait_for_device_writes()
        try:
            failure = self._native.sync(native)
        except RuntimeError as error:
            raise ClosedError(str(error)) from None
        if failure is not None:
            raise transfer_error("sync", file.path, failure, NATIVE_CODES)
        if device_failure is not None:
            raise device_failure

    def counters(self) -> dict[str, int]:
        """Return what this engine has done so far, as counts by name; of a closed engine the last ones.

        Bytes moved: `bytes_read`, `bytes_written`; the same by route: `zero_copy_bytes`, `staged_bytes`,
        `buffered_bytes`. Transfers: `blocks`, and those `continued` after a short one. Memory held now, in bytes:
        `staging_bytes`, of which `registered_bytes` are registered with the kernel.
        """
        return self._native.counters()

    def close(self) -> None:
        """Finish all submitted requests and stop the threads; does not sync. Later calls raise ClosedError, except
        `close`.
        """
        if self._device_transfers is not None:
            self._device_transfers.close()
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<Engine {self.backend} queue_depth={self.queue_depth} block_bytes={self.block_bytes} "
            f"threads={self.threads}{state}>"
        )

    def _submit(self, write: bool, file: File, buffers: Any, offset: int, checksum: bool) -> Request:
        """Start a read, or with `write` a write, of one host buffer, a list of them, or one accelerator tensor, at
        `offset` of the file (bytes); return the request. `checksum`: compute that of the bytes. InvalidBufferError,
        InvalidOffsetError, AccessError or ClosedError if it cannot be started.
        """
        if _buffers.is_device_tensor(buffers):
            self._native_file_for(file, write)
            return self._get_device_transfers().submit(write, file, buffers, offset, checksum)
        return self.submit_items(write, file, _buffers.describe_all(buffers, not write), offset, checksum)

    def submit_items(self, write: bool, file: File, items: list[Any], offset: int, checksum: bool) -> Request:
        """Start a read, or with `write` a write, of described buffers that follow each other in the file from `offset`
        (bytes) on; return the request. `checksum`: compute that of the bytes. Internal. InvalidBufferError,
        InvalidOffsetError, AccessError or ClosedError if it cannot be started.
        """
        native = self._native_file_for(file, write)
        require_offset(file.path, offset, sum(map(_buffers.nbytes_of, items)))
        try:
            request = self._native.submit(write, native, items, offset, checksum)
        except BufferError as error:
            raise InvalidBufferError(str(error)) from None
        except RuntimeError as error:
            raise ClosedError(str(error)) from None
        return Request(request, self._native, "write" if write else "read", file.path, _buffers.lent(items))

    def _get_device_transfers(self) -> DeviceTransfers:
        """Return the object that moves accelerator tensors, made on first use."""
        from ._device import DeviceTransfers

        with self._device_lock:
            if self._device_transfers is None:
                self._device_transfers = DeviceTransfers(self.read, self.write)
            return self._device_transfers

    def _native_file_for(self, file: File, write: bool) -> _native.File:
        """Return the native engine's object for a file. AccessError if the file's mode forbids reading, or with `write`
        writing; ClosedError if the file or this engine is closed, or if another engine opened the file.
        """
        self._require_open()
        native = file.native
        if file.engine is not self._native:
            raise ClosedError(f"'{file.path}' was opened by another engine; use it with that one", path=file.path)
        if ("w" if write else "r") not in file.mode:
            verb = "written" if write else "read"
            raise AccessError(f"'{file.path}' was opened with mode '{file.mode}' and cannot be {verb}", path=file.path)
        return native

    def _require_open(self) -> None:
        """Raise ClosedError if the engine is closed, or belongs to the parent of this forked process."""
        if self._native.forked():
            raise ClosedError("the engine belongs to the parent process; make a new one after fork()")
        if self._native.closed():
            raise ClosedError("the engine is closed")

    def _settings_for(self, path: str) -> tuple[int, int]:
        """Return (block bytes, queue depth) that were tuned for the device of a path; (0, 0), which stands for this
        engine's own settings, if it was never tuned.
        """
        from ._tuning import lookup

        found = lookup(path)
        if found is None:
            return (0, 0)
        return (found.block_bytes, found.queue_depth)


def _check_range(name: str, value: int, low: int, high: int) -> int:
    """Return `value` if it is an integer (not a bool) from `low` to `high`; else ValueError, with `name` as the
    setting's name.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"expected {name} to be an integer from {low} to {high}, got {value!r}")
    return value


def _check_block_bytes(name: str, value: int) -> int:
    """Return `value` if it is a multiple of 4096 from 4096 bytes to 1 GiB; else ValueError, with `name` as the
    setting's name.
    """
    _check_range(name, value, 4096, 1 << 30)
    if value % 4096:
        raise ValueError(f"expected {name} to be a multiple of 4096, got {value}")
    return value
