"""A transfer under way, carried out by the native part of an engine, in C++ (`_native`)."""

from __future__ import annotations

from . import _native
from .errors import AioError, ClosedError, WaitTimeoutError, transfer_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from ._buffers import Lent

__all__ = ["NATIVE_CODES", "Request", "format_checksum"]

NATIVE_CODES = (_native.END_OF_FILE, _native.CANCELLED)


class Request:
    """One transfer under way, made by an engine. The request keeps its buffers alive until the kernel is done with
    them, also when the request itself is dropped.

    May be waited for from several threads and awaited from several asyncio tasks; giving up a wait (timeout, Ctrl-C, a
    cancelled task) leaves the transfer running. `native` and `engine` are the native request and the native engine that
    carries it out. `kind` ("read" or "write") and `path` are for messages. `lent`: tensors whose storage must not
    change meanwhile.
    """

    __slots__ = ("__weakref__", "_engine", "_kind", "_lent", "_native", "_path")

    def __init__(
        self, native: _native.Request, engine: _native.Engine, kind: str, path: str, lent: tuple[Lent, ...] = ()
    ) -> None:
        self._lent = lent
        self._native = native
        self._engine = engine
        self._kind = kind
        self._path = path

    @property
    def nbytes(self) -> int:
        """Return the bytes that the request moves in total, whether or not it has ended."""
        return self._native.nbytes()

    @property
    def checksum(self) -> str | None:
        """Return `"xxh3_64:<16 hex>"` of the bytes moved; None until the request is done, or if no checksum was asked
        for.
        """
        value = self._native.checksum()
        return None if value is None else format_checksum(value)

    def done(self) -> bool:
        """Return whether the request has ended, successfully or not; never blocks."""
        return self._native.done()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the request has ended and return the bytes moved. May be called again, with the same result.

        `timeout` is in seconds; None waits without end, a negative one is a ValueError. Raises WaitTimeoutError if it
        passes first, and the request's own error (EndOfFileError, NoSpaceError, DeviceError, …) if it failed.
        ClosedError in a forked child, InvalidBufferError if the storage of a tensor was resized or replaced meanwhile.
        """
        if timeout is not None and timeout < 0:
            raise ValueError(f"expected a timeout of 0 or more seconds, got {timeout}")
        self._refuse_fork()
        if not self._native.wait(-1.0 if timeout is None else timeout):
            raise WaitTimeoutError(
                f"{self._kind} of '{self._path}' is still under way after {timeout} s", path=self._path
            )
        return self._result()

    def error(self) -> AioError | None:
        """Return the error of a request that has failed, the one that `wait` raises; None if it has not ended or did
        not fail. Never blocks.
        """
        failure = self._native.failure()
        return None if failure is None else transfer_error(self._kind, self._path, failure, NATIVE_CODES)

    def times(self) -> tuple[int, int]:
        """Return when the request was submitted and when it ended, in nanoseconds of the monotonic clock; the second is
        0 until it has ended.
        """
        return self._native.times()

    def settle(self, timeout: float | None = None) -> bool:
        """Block until the request has ended, successfully or not, for `timeout` seconds at most (None: without end);
        return whether it has ended. Does not raise the request's error. ClosedError in a forked child.
        """
        self._refuse_fork()
        return self._native.wait(-1.0 if timeout is None else timeout)

    def cancel(self) -> None:
        """Start no further block of this request, which ends after the blocks that the kernel already has.

        `wait` then raises RequestCancelledError, unless the request had ended before.
        """
        if not self._native.done():
            self._engine.cancel(self._native)

    def __await__(self) -> Generator[Any, None, int]:
        """Wait without blocking the event loop; the result and the errors are those of `wait`. Cancelling the task
        leaves the transfer running.
        """
        if not self._native.done():
            from ._await import until_done

            self._refuse_fork()
            yield from until_done(self._native).__await__()
        return self._result()

    def __repr__(self) -> str:
        state = "done" if self._native.done() else "under way"
        return f"<Request {self._kind} {self.nbytes} bytes of '{self._path}', {state}>"

    def _refuse_fork(self) -> None:
        """Raise ClosedError if the request has not ended and this process was forked from the one that made the engine:
        here nothing would ever end it.
        """
        if self._engine.forked() and not self._native.done():
            raise ClosedError("the request belongs to the parent process; make a new engine after fork()")

    def _result(self) -> int:
        """Return the bytes that an ended request moved, or raise its error; InvalidBufferError if the storage of a
        tensor was resized or replaced meanwhile. The first call stops watching the tensors' storage.
        """
        for tensor in self._lent:
            tensor.require_unchanged(self._kind, self._path)
        self._lent = ()
        error = self.error()
        if error is not None:
            raise error
        return self._native.nbytes()


def format_checksum(value: int) -> str:
    """Return an xxh3_64 checksum as text, `"xxh3_64:<16 hex>"`, as it is written in all files of this project."""
    return f"xxh3_64:{value:016x}"
