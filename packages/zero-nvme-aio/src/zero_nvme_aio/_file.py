"""An open file of an engine, whose native part, in C++, is in `_native`."""

from __future__ import annotations

import threading
import weakref

from . import _native
from .errors import ClosedError, InvalidOffsetError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

_MAX_OFFSET = 2**63 - 1


class File:
    """A file opened by an engine; close it, or use it as a context manager. `native`: the native engine's own file
    object.

    Attributes:
        engine: the native engine that opened it; no other can use it.
        path: the path as the user gave it.
        mode: "r", "w" or "rw".
    """

    __slots__ = ("__weakref__", "_device", "_finalizer", "_native", "engine", "mode", "path")

    def __init__(self, native: _native.File, engine: _native.Engine, path: str, mode: str) -> None:
        self._native: _native.File | None = native
        self.engine = engine
        self.path = path
        self.mode = mode
        self._device = _DeviceTransfers()
        self._finalizer = weakref.finalize(self, engine.release, native)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""
        return self._native is None

    @property
    def direct(self) -> bool:
        """Return whether transfers of whole pages bypass the page cache."""
        return self.native.direct

    @property
    def direct_reason(self) -> str:
        """Return the reason why direct I/O is or is not used."""
        return self.native.direct_reason

    @property
    def granularity(self) -> int:
        """Return the number of bytes of which the file offsets of direct transfers must be multiples; 1 for a buffered
        file.
        """
        return self.native.granularity

    @property
    def memory_alignment(self) -> int:
        """Return the number of bytes of which memory addresses must be multiples for a transfer to need no copy; 1 for
        a buffered file.
        """
        return self.native.memory_alignment

    @property
    def size(self) -> int:
        """Return the current size of the file in bytes; ClosedError after `close`."""
        return self.native.size()

    @property
    def native(self) -> _native.File:
        """Return the native engine's file; ClosedError after `close`."""
        if self._native is None:
            raise ClosedError(f"'{self.path}' is closed", path=self.path)
        return self._native

    def close(self) -> None:
        """Wait for the file's requests and close it; does not sync. May be called twice."""
        if self._native is not None:
            self._device.wait(reads=True)
            self._native = None
            self._finalizer()

    def follow(self, future: Future[int], write: bool) -> None:
        """Have `close` wait for the transfer of an accelerator tensor whose result ``future`` will have; if it is a
        write, `wait_for_device_writes` waits for it too. Internal.
        """
        self._device.add(future, write)

    def wait_for_device_writes(self) -> BaseException | None:
        """Wait for all writes of accelerator tensors to this file. Return the error of the first that failed since the
        last call, None if none did. Internal.
        """
        self._device.wait(reads=False)
        return self._device.take_failure()

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<File '{self.path}' mode '{self.mode}'{', closed' if self.closed else ''}>"


class _DeviceTransfers:
    """The transfers of accelerator tensors of one file that have not ended; safe for several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: dict[Future[int], bool] = {}  # whether it is a write
        self._failure: BaseException | None = None

    def add(self, future: Future[int], write: bool) -> None:
        """Follow a transfer until it ends; ``write``: it writes to the file."""
        with self._changed:
            self._under_way[future] = write
        future.add_done_callback(self._end)

    def wait(self, *, reads: bool) -> None:
        """Block until every write, and with ``reads`` every read, that is under way has ended; raises no errors."""
        with self._changed:
            awaited = {future for future, write in self._under_way.items() if write or reads}
            self._changed.wait_for(lambda: awaited.isdisjoint(self._under_way))

    def take_failure(self) -> BaseException | None:
        """Return the error of the first write that failed since the last call, None if none did."""
        with self._changed:
            failure, self._failure = self._failure, None
        return failure

    def _end(self, future: Future[int]) -> None:
        """Forget a transfer that has ended; keep its error for `take_failure` if it is a write that failed and no
        earlier error is kept.
        """
        with self._changed:
            if self._under_way.pop(future) and self._failure is None:
                self._failure = future.exception()
            self._changed.notify_all()


def require_offset(path: str, offset: int, nbytes: int) -> None:
    """Raise InvalidOffsetError unless a file can hold `nbytes` at `offset` (bytes); `path` is for the message."""
    if not 0 <= offset <= _MAX_OFFSET - nbytes:
        raise InvalidOffsetError(
            f"expected an offset from 0 to 2**63 - 1 minus the bytes moved, got {offset} for '{path}'",
            path=path,
            offset=offset,
        )
