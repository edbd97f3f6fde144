"""Aligned memory that direct I/O needs no copy for, and pools of it."""

from __future__ import annotations

import errno
import threading

from . import _native
from .errors import AioError, ClosedError, WaitTimeoutError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

__all__ = ["AlignedBuffer", "BufferPool"]


class AlignedBuffer(_native.Mapping):
    """`nbytes` bytes of zeroed memory that direct I/O needs no copy for; exports the buffer protocol (one dimension,
    bytes).

    Lies in huge pages where whole ones fit (`huge_pages`), is resident from the start, and is optionally locked
    (`lock`). It costs `charged_bytes`: `nbytes` rounded up to whole 4 KiB pages. `numpy.frombuffer` and
    `torch.frombuffer` take it and keep it alive; the memory is freed when neither it nor a view of it is referenced.
    Raises ValueError for a size below 0, AioError with ENOMEM when there is no memory, or none that may be locked.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, lock: bool = False) -> None:
        if not isinstance(nbytes, int) or nbytes < 0:
            raise ValueError(f"expected a size of 0 or more bytes, got {nbytes!r}")
        try:
            super().__init__(nbytes, huge_pages, lock)
        except (OSError, TypeError) as error:
            code = getattr(error, "errno", None) or errno.ENOMEM
            hint = "; raise the limit (`ulimit -l`) or leave `lock` out" if lock else ""
            raise AioError(
                f"cannot get {nbytes} bytes of {'locked ' if lock else ''}memory{hint}", errno=code
            ) from None

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        return f"<AlignedBuffer {self.nbytes} bytes>"


class BufferPool:
    """A fixed number (`count`) of AlignedBuffers of `nbytes` each, allocated once and reused; safe for several threads.
    `huge_pages`: use huge pages where whole ones fit; `lock`: lock the memory. AioError when there is no such memory,
    ValueError for a count below 1.

    `take` blocks until a buffer is free, `give_back` makes it free again; `with pool.borrow() as buffer` does both.
    """

    def __init__(self, nbytes: int, count: int, *, huge_pages: bool = True, lock: bool = False) -> None:
        if count < 1:
            raise ValueError(f"expected a count of 1 or more, got {count}")
        self._all = [AlignedBuffer(nbytes, huge_pages=huge_pages, lock=lock) for _ in range(count)]
        self._free = list(self._all)
        self._changed = threading.Condition()
        self._closed = False

    @property
    def charged_bytes(self) -> int:
        """Return the bytes of memory that the buffers occupy, taken or free; 0 once the pool is closed."""
        return sum(buffer.charged_bytes for buffer in self._all)

    def take(self, timeout: float | None = None) -> AlignedBuffer:
        """Take a free buffer out of the pool and return it, its content unspecified; block while none is free.

        Raises WaitTimeoutError after `timeout` seconds (None: never), ClosedError once the pool is closed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, timeout):
                raise WaitTimeoutError(f"none of {len(self._all)} buffers came back within {timeout} s")
            if self._closed:
                raise ClosedError("the pool is closed")
            return self._free.pop()

    def give_back(self, buffer: AlignedBuffer) -> None:
        """Put a taken buffer back into the pool; do nothing once the pool is closed. ValueError for a buffer that was
        not taken from it.
        """
        with self._changed:
            if self._closed:
                return
            if not any(buffer is own for own in self._all) or any(buffer is free for free in self._free):
                raise ValueError("the buffer was not taken from this pool, or was already given back")
            self._free.append(buffer)
            self._changed.notify()

    def borrow(self, timeout: float | None = None) -> _Borrowed:
        """Return a context manager that takes a buffer on entry, yields it, and gives it back on exit. On entry
        WaitTimeoutError after `timeout` seconds (None: never), ClosedError once the pool is closed.
        """
        return _Borrowed(self, timeout)

    def close(self) -> None:
        """Close the pool: `take` raises ClosedError, also in threads that are waiting in it, and each buffer's memory
        is freed once nothing refers to it. May be called twice.
        """
        with self._changed:
            self._closed = True
            self._all.clear()
            self._free.clear()
            self._changed.notify_all()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Borrowed:
    """Takes a buffer from `pool` for the length of a `with` block, waiting up to `timeout` seconds for one (None:
    without end).
    """

    def __init__(self, pool: BufferPool, timeout: float | None) -> None:
        self._pool = pool
        self._timeout = timeout

    def __enter__(self) -> AlignedBuffer:
        self._buffer = self._pool.take(self._timeout)
        return self._buffer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.give_back(self._buffer)
