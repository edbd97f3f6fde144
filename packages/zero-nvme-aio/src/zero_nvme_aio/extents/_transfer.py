"""Transfers of a store over several paths."""

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
    """Starts a failed write on another path."""

    def __call__(self, transfer: PathWrite, failed: Request, error: AioError, *, block: bool) -> bool:
        """Put the request of a new attempt into `transfer`, whose request `failed` with `error`, unless another thread
        has done that; return whether it goes on. Without `block`, also return True, having done nothing, while another
        thread uses the store.
        """


class PathRead:
    """A read from one of `paths`, number `stripe`, as the engine's `Request` under it, whose error says which path that
    is. A path that does not answer while it is waited for is said.
    """

    __slots__ = ("_paths", "request", "stripe")

    def __init__(self, request: Request, paths: StorePaths, stripe: int) -> None:
        self.request = request
        self._paths = paths
        self.stripe = stripe

    @property
    def nbytes(self) -> int:
        """Return the bytes that it moves in total."""
        return self.request.nbytes

    @property
    def checksum(self) -> str | None:
        """Return the checksum of the bytes moved; None until it has ended, or if it was not asked for."""
        return self.request.checksum

    def done(self) -> bool:
        """Return whether it has ended, successfully or not; never blocks."""
        return self.request.done()

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended and return the bytes moved. Errors as of `Request.wait`."""
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
        """Block until it has ended, successfully or not; do not raise its error."""
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
        """Return if the transfer goes on after an error that waiting for its `request` raised; else raise that, with
        the path's name in it.
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
        """Called once it has ended for good, with an error or without; do nothing."""

    def _is_restarted(self, failed: Request, error: AioError, *, block: bool) -> bool:
        """Return False: what is on a path cannot be read from another."""
        return False


class PathWrite(PathRead):
    """A write to one path, or to another if that one fails; then `move` starts it again. The memory must not change
    until it is done, and is not used any more then.
    """

    __slots__ = ("_move",)

    def __init__(self, request: Request, paths: StorePaths, stripe: int, move: Move) -> None:
        super().__init__(request, paths, stripe)
        self._move: Move | None = move

    def done(self) -> bool:
        """Return whether it has ended, successfully or not; never blocks. Starts it again if it failed and can go to
        another path.
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
        """Let go of the memory that was written."""
        self._move = None

    def _is_restarted(self, failed: Request, error: AioError, *, block: bool) -> bool:
        """Return whether it was started again, by this call or another thread's."""
        move = self._move
        return failed is not self.request or (move is not None and move(self, failed, error, block=block))
