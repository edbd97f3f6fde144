"""GPUDirect Storage: the engine's interface over kvikio, for tensors in CUDA memory.

Needs the extra `gds`. kvikio itself falls back to POSIX I/O where the driver is missing; `GdsEngine.direct` says which
it is.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from types import TracebackType
from typing import Any

from . import _buffers
from .errors import AioError, ClosedError, EndOfFileError, InvalidBufferError, TransferError, open_error

__all__ = ["GdsEngine", "GdsFile", "GdsRequest"]

_FLAGS = {"r": "r", "w": "w", "rw": "r+"}


class GdsRequest:
    """A transfer by kvikio; behaves like `Request`, but cannot be cancelled and waits without a timeout."""

    checksum: str | None = None

    def __init__(self, future: Any, path: str, nbytes: int, owner: Any) -> None:
        self._future = future
        self._path = path
        self._owner = owner
        self.nbytes = nbytes

    def done(self) -> bool:
        """Whether the request has ended."""
        return bool(self._future.done())

    def wait(self) -> int:
        """Blocks until the request has ended and returns the bytes moved."""
        try:
            moved = int(self._future.get())
        except (RuntimeError, OSError) as error:
            raise TransferError(f"GPUDirect transfer of '{self._path}': {error}", path=self._path) from error
        self._owner = None
        if moved != self.nbytes:
            raise EndOfFileError(
                f"GPUDirect transfer of '{self._path}': expected {self.nbytes} bytes, got {moved}",
                path=self._path,
                expected=self.nbytes,
                got=moved,
            )
        return moved

    def __await__(self) -> Generator[Any, None, int]:
        import asyncio

        return asyncio.to_thread(self.wait).__await__()


class GdsFile:
    """A file opened by a GdsEngine."""

    def __init__(self, handle: Any, path: str, mode: str) -> None:
        self._handle = handle
        self.path = path
        self.mode = mode

    @property
    def handle(self) -> Any:
        """kvikio's file; raises ClosedError when closed."""
        if self._handle is None:
            raise ClosedError(f"'{self.path}' is closed", path=self.path)
        return self._handle

    def close(self) -> None:
        """Closes the file; wait for its requests first. May be called twice."""
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
    """Moves CUDA memory to and from files without a bounce through host memory, where driver and file system allow.

    `read`, `write`, `sync`, `open` and `close` as in `Engine`. Raises AioError when kvikio is not installed.
    """

    def __init__(self) -> None:
        try:
            self._kvikio: Any = importlib.import_module("kvikio")
        except ImportError as error:
            raise AioError(f"GPUDirect Storage needs kvikio ({error}); pip install zero-nvme-aio[gds]") from error

    @property
    def direct(self) -> bool:
        """Whether transfers really go by GPUDirect; otherwise kvikio uses POSIX I/O."""
        return not bool(self._kvikio.defaults.is_compat_mode_preferred())

    def open(self, path: str | os.PathLike[str], mode: str = "r") -> GdsFile:
        """Opens a file: "r", "w" or "rw", as in `Engine.open`."""
        if mode not in _FLAGS:
            raise ValueError(f"expected mode 'r', 'w' or 'rw', got {mode!r}")
        name = os.fspath(path)
        if mode == "rw" and not os.path.exists(name):
            os.close(os.open(name, os.O_CREAT | os.O_CLOEXEC | os.O_RDWR, 0o666))
        try:
            return GdsFile(self._kvikio.CuFile(name, _FLAGS[mode]), name, mode)
        except OSError as error:
            raise open_error(name, error) from None
        except RuntimeError as error:
            raise open_error(name, OSError(None, str(error))) from error

    def read(self, file: GdsFile, out: Any, offset: int = 0) -> GdsRequest:
        """Starts filling a contiguous CUDA tensor (or host buffer) from the file at `offset` bytes."""
        memory = _flat(out)
        return GdsRequest(file.handle.pread(memory, memory.nbytes, offset), file.path, memory.nbytes, memory)

    def write(self, file: GdsFile, data: Any, offset: int = 0) -> GdsRequest:
        """Starts writing a contiguous CUDA tensor (or host buffer) to the file at `offset` bytes."""
        memory = _flat(data)
        return GdsRequest(file.handle.pwrite(memory, memory.nbytes, offset), file.path, memory.nbytes, memory)

    def sync(self, file: GdsFile) -> None:
        """Blocks until what was written is on stable storage; wait for the requests first."""
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing to do: kvikio's threads belong to the process."""

    def __enter__(self) -> GdsEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _flat(buffer: Any) -> Any:
    if not _buffers.is_tensor(buffer):
        return buffer
    if not buffer.is_contiguous():
        raise InvalidBufferError("expected contiguous memory, got a strided tensor; call .contiguous() first")
    return buffer.detach().reshape(-1).view(importlib.import_module("torch").uint8)
