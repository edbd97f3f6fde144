"""GPUDirect Storage: the engine's interface over kvikio, for tensors in CUDA memory.

Needs the extra `gds`. kvikio itself falls back to POSIX I/O where the driver is missing; `GdsEngine.direct` says which
it is.
"""

from __future__ import annotations

import errno
import importlib
import os
import stat
import threading
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

from . import _buffers
from ._file import require_offset
from .errors import (
    AccessError,
    AioError,
    ClosedError,
    EndOfFileError,
    InvalidBufferError,
    TransferError,
    WaitTimeoutError,
    open_error,
)

__all__ = ["GdsEngine", "GdsFile", "GdsRequest"]

_FLAGS = {"r": "r", "w": "w", "rw": "r+"}
_OPEN_FLAGS = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT, "rw": os.O_RDWR | os.O_CREAT}
_POLL_SECONDS = 0.0005


class GdsRequest:
    """A transfer of `nbytes` by kvikio; used like `Request`. kvikio starts all of it at once, as `futures`, one for
    each buffer, so `cancel` stops nothing. The request keeps its buffers, `owners`, alive until `wait` or `settle`. Its
    `checksum` is None. `path`: of the file, for messages.
    """

    checksum: str | None = None

    def __init__(self, futures: Sequence[Any], path: str, nbytes: int, owners: Sequence[Any]) -> None:
        self._futures = futures
        self._path = path
        self._owners = owners
        self._lock = threading.Lock()  # a future of kvikio may be asked for its result only once, by one thread
        self._failure: AioError | None = None
        self.nbytes = nbytes

    def done(self) -> bool:
        """Return whether the request has ended, successfully or not; never blocks. False also while another thread
        waits.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return all(future.done() for future in self._futures)
        finally:
            self._lock.release()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the request has ended and return the bytes moved.

        `timeout` is in seconds; None waits without end. Raises WaitTimeoutError if it passes first, TransferError if
        kvikio fails, EndOfFileError if fewer bytes moved.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while deadline is not None and not self.done():
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"transfer of '{self._path}' is still under way after {timeout} s", path=self._path
                )
            time.sleep(_POLL_SECONDS)
        self.settle()
        if self._failure is not None:
            raise self._failure
        return self.nbytes

    def settle(self) -> None:
        """Block until the request has ended, successfully or not; does not raise its error."""
        with self._lock:
            moved, problem = 0, None
            for future in self._futures:  # after an error too: the other parts still use the memory
                try:
                    moved += int(future.get())
                except (RuntimeError, OSError) as error:
                    problem = problem or error
            if problem is not None:
                self._failure = TransferError(f"GPUDirect transfer of '{self._path}': {problem}", path=self._path)
            elif self._futures and moved != self.nbytes:
                self._failure = EndOfFileError(
                    f"GPUDirect transfer of '{self._path}': expected {self.nbytes} bytes, got {moved}",
                    path=self._path,
                    expected=self.nbytes,
                    got=moved,
                )
            self._futures = self._owners = ()

    def cancel(self) -> None:
        """Do nothing: kvikio finishes every transfer it was given."""

    def __await__(self) -> Generator[Any, None, int]:
        """Wait in a thread, without blocking the event loop; the result and the errors are those of `wait`."""
        import asyncio

        return asyncio.to_thread(self.wait).__await__()


class GdsFile:
    """A file opened by a GdsEngine; close it, or use it as a context manager. `path`: as the user gave it; `mode`: "r",
    "w" or "rw". `handle`: the file object of kvikio, which `close` closes.
    """

    def __init__(self, handle: Any, path: str, mode: str) -> None:
        self._handle = handle
        self.path = path
        self.mode = mode

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._handle is None

    @property
    def handle(self) -> Any:
        """Return the file object of kvikio; ClosedError after `close`."""
        if self._handle is None:
            raise ClosedError(f"'{self.path}' is closed", path=self.path)
        return self._handle

    @property
    def size(self) -> int:
        """Return the current size in bytes of the file at `path`, open or not; OSError if it is gone."""
        return os.stat(self.path).st_size

    def close(self) -> None:
        """Close the file; wait for its requests first. May be called twice."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def __enter__(self) -> GdsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GdsEngine:
    """Moves CUDA memory to and from files without a copy through host memory, where driver and file system allow it.
    Its methods are used like those of `Engine`. The constructor raises AioError if kvikio is not installed.
    """

    def __init__(self) -> None:
        try:
            self._kvikio: Any = importlib.import_module("kvikio")
        except ImportError as error:
            raise AioError(f"GPUDirect Storage needs kvikio ({error}); pip install zero-nvme-aio[gds]") from error
        self._closed = False

    @property
    def direct(self) -> bool:
        """Return whether transfers bypass host memory; if not, kvikio uses POSIX I/O."""
        return not bool(importlib.import_module("kvikio.defaults").is_compat_mode_preferred())

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def open(self, path: str | os.PathLike[str], mode: str = "r") -> GdsFile:
        """Open a file: "r" (must exist), "w" (created or emptied), "rw" (created if missing, content kept). Raises
        ValueError for another mode, MissingPathError, DirectoryPathError, AccessError, OpenError, ClosedError.
        """
        if mode not in _FLAGS:
            raise ValueError(f"expected mode 'r', 'w' or 'rw', got {mode!r}")
        self._require_open()
        name = os.fspath(path)
        try:
            _try_open(name, mode)
            return GdsFile(self._kvikio.CuFile(name, _FLAGS[mode]), name, mode)
        except OSError as error:
            raise open_error(name, error) from None
        except RuntimeError as error:
            raise open_error(name, OSError(None, str(error))) from error

    def read(self, file: GdsFile, out: Any, offset: int = 0, *, checksum: bool = False) -> GdsRequest:
        """Start filling `out` (a contiguous CUDA tensor or host buffer, or a list of them) from the file at `offset`
        bytes, and return the request.

        Raises InvalidBufferError for a strided tensor or with `checksum`, InvalidOffsetError, AccessError,
        TransferError, ClosedError.
        """
        return self._start(False, file, out, offset, checksum)

    def write(self, file: GdsFile, data: Any, offset: int = 0, *, checksum: bool = False) -> GdsRequest:
        """Start writing `data` (a contiguous CUDA tensor or host buffer, or a list of them) to the file at `offset`
        bytes, and return the request; the memory must not change until it has ended. Errors as for `read`.
        """
        return self._start(True, file, data, offset, checksum)

    def sync(self, file: GdsFile) -> None:
        """Block until the file's content is on stable storage; wait for its requests first, which this does not.
        ClosedError after the engine's `close`.
        """
        self._require_open()
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Refuse further use; kvikio's threads belong to the process and stay. May be called twice."""
        self._closed = True

    def __enter__(self) -> GdsEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, write: bool, file: GdsFile, buffers: Any, offset: int, checksum: bool) -> GdsRequest:
        """Start a read, or with `write` a write, of one buffer or of a list of buffers that follow each other in the
        file from `offset` (bytes) on; return the request. Errors as for `read`.
        """
        self._require_open()
        if checksum:
            raise InvalidBufferError("no checksum is computed on the way of GPUDirect; copy to host memory first")
        if ("w" if write else "r") not in file.mode:
            raise AccessError(f"'{file.path}' was opened with mode '{file.mode}'", path=file.path)
        memories = [_flat(buffer) for buffer in (buffers if isinstance(buffers, (list, tuple)) else [buffers])]
        nbytes = sum(memory.nbytes for memory in memories)
        require_offset(file.path, offset, nbytes)
        move = file.handle.pwrite if write else file.handle.pread
        futures: list[Any] = []
        request = GdsRequest(futures, file.path, nbytes, memories)
        try:
            for memory in memories:
                if memory.nbytes > 0:
                    futures.append(move(memory, memory.nbytes, offset))
                offset += memory.nbytes
        except (RuntimeError, ValueError) as error:
            request.settle()  # what was started already uses the caller's memory
            raise TransferError(f"GPUDirect transfer of '{file.path}': {error}", path=file.path) from error
        return request

    def _require_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._closed:
            raise ClosedError("the engine is closed")


def _try_open(path: str, mode: str) -> None:
    """Open a file in this mode and close it again, because kvikio's own errors are not typed and its "rw" does not
    create the file. OSError if it cannot be opened, or is a directory.
    """
    fd = os.open(path, _OPEN_FLAGS[mode] | os.O_CLOEXEC, 0o666)
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.close(fd)
    if is_folder:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _flat(buffer: Any) -> Any:
    """Return `buffer` in a form that has `nbytes`, as kvikio needs it, without a copy: a tensor as flat bytes, another
    buffer as it is or as a memoryview. InvalidBufferError for a strided tensor.
    """
    if not _buffers.is_tensor(buffer):
        return buffer if hasattr(buffer, "nbytes") else memoryview(buffer)
    if not buffer.is_contiguous():
        raise InvalidBufferError("expected contiguous memory, got a strided tensor; call .contiguous() first")
    return buffer.detach().reshape(-1).view(importlib.import_module("torch").uint8)
