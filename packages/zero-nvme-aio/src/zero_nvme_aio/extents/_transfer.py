"""Transfers of a store with several paths, which tell users about a path that does not answer. A stripe is the number
of a path, from 0.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Protocol

from .._request import Request
from ..errors import AioError, WaitTimeoutError
from ._paths import StorePaths

__all__ = ["PathRead", "PathWrite"]

SILENT_SECONDS = 30.0
"""How long a path may not answer before that is said."""


class Move(Protocol):
    """Starts a failed write again on another path."""

    def __call__(self, transfer: PathWrite, failed: Request, error: AioError, *, block: bool) -> bool:
        """Start the write of `transfer`, whose request `failed` with `error`, again on another path, and put the new
        request into `transfer`; do nothing if another thread has done that. Return whether the write continues, so
        False if no path is left. Without `block`, also return True, having done nothing, while another thread uses the
        store.
        """


class PathRead:
    """A read from number `stripe` of `paths`, carried out by `request`, a request of the engine; used like one, but its
    errors name the path. If the path does not answer for 30 seconds while the read is waited for, users are told.
    """

    __slots__ = ("_paths", "request", "stripe")

    def __init__(self, request: Request, paths: StorePaths, stripe: int) -> None:
        self.request = request
        self._paths = paths
        self.stripe = stripe

    @property
    def nbytes(self) -> int:
        """Return the bytes that the transfer moves in total."""
        return self.request.nbytes

    @property
    def checksum(self) -> str | None:
        """Return the checksum of the bytes moved; None until the transfer has ended, or if no checksum was
        asked for.
        """
        return self.request.checksum

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not; never blocks."""
        return self.request.done()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the transfer has ended and return the bytes moved; `timeout` is in seconds (None: without end).
        WaitTimeoutError if it passes first, else the request's own error if it failed.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            request = self.request
            try:
                moved = request.wait(max(0.0, min(SILENT_SECONDS, deadline - time.monotonic())))
            except WaitTimeoutError:
                self._paths.tell_if_silent(self.stripe, SILENT_SECONDS)
                if time.monotonic() >= deadline:
                    raise
            except AioError as error:
                self._continue_or_raise(request, error)
            else:
                self._note_end()
                return moved

    def settle(self) -> None:
        """Block until the transfer has ended, successfully or not; do not raise its error."""
        while True:
            request = self.request
            while not request.settle(SILENT_SECONDS):
                self._paths.tell_if_silent(self.stripe, SILENT_SECONDS)
            error = request.error()
            if error is None or not self._is_restarted(request, error, block=True):
                self._note_end()
                return

    def __await__(self) -> Generator[Any, None, int]:
        """Wait without blocking the event loop; result and errors as of `wait`."""
        while True:
            request = self.request
            try:
                moved = yield from request.__await__()
            except AioError as error:
                self._continue_or_raise(request, error)
            else:
                self._note_end()
                return moved

    def _continue_or_raise(self, request: Request, error: AioError) -> None:
        """Return if the transfer was started again after `error`, which waiting for `request` has raised; otherwise
        raise `error`, with the path's name added to its message.
        """
        if request.error() is not None and self._is_restarted(request, error, block=True):
            return
        if request.done():
            self._note_end()
        name = self._paths.name(self.stripe)
        if error.errno is not None and error.path is not None and name not in error.message:
            error.message += f"; the path is {name}"
        raise error

    def _note_end(self) -> None:
        """Hook for subclasses, called once the transfer has ended for good, with an error or without; does nothing
        here.
        """

    def _is_restarted(self, failed: Request, error: AioError, *, block: bool) -> bool:
        """Return whether the transfer was started again after its request `failed` with `error`. Here always False:
        what is on a path cannot be read from another. `block` makes a difference for writes only.
        """
        return False


class PathWrite(PathRead):
    """A write to number `stripe` of `paths`, or to another if that one fails; then `move` starts it again. The memory
    must not change until the write is done, and is not used afterwards.
    """

    __slots__ = ("_move",)

    def __init__(self, request: Request, paths: StorePaths, stripe: int, move: Move) -> None:
        super().__init__(request, paths, stripe)
        self._move: Move | None = move

    def done(self) -> bool:
        """Return whether the write has ended, successfully or not; never blocks. If its request failed and the write
        can go to another path, starts it again there and returns False.
        """
        request = self.request
        if not request.done():
            return False
        error = request.error()
        if error is not None and self._is_restarted(request, error, block=False):
            return False
        self._note_end()
        return True

    def _note_end(self) -> None:
        """Drop the reference to `move`, which keeps the memory that was written alive."""
        self._move = None

    def _is_restarted(self, failed: Request, error: AioError, *, block: bool) -> bool:
        """Return whether the write was started again after its request `failed` with `error`, by this call or by
        another thread. Without `block`, return True also while another thread uses the store, which then decides.
        """
        move = self._move
        return failed is not self.request or (move is not None and move(self, failed, error, block=block))
