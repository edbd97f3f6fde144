"""Transfers of a store over several paths."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Protocol

from .._request import Request
from ..errors import AioError

__all__ = ["PathRead", "PathWrite"]


class Move(Protocol):
    """Starts a failed write on another path."""

    def __call__(self, transfer: PathWrite, error: AioError, *, block: bool) -> bool:
        """Put the request of a new attempt into `transfer`, whose request ended with `error`; return whether it goes
        on. Without `block`, also return True, having done nothing, while another thread uses the store.
        """


class PathRead:
    """A read from one path, as the engine's `Request` under it, whose error says which path that is (`path_name`)."""

    __slots__ = ("path_name", "request")

    def __init__(self, request: Request, path_name: str) -> None:
        self.request = request
        self.path_name = path_name

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
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                moved = self.request.wait(left)
            except AioError as error:
                self._go_on_after(error)
            else:
                self._ended()
                return moved

    def settle(self) -> None:
        """Block until it has ended, successfully or not; do not raise its error."""
        while True:
            self.request.settle()
            error = self.request.error()
            if error is None or not self._goes_on(error, block=True):
                self._ended()
                return

    def __await__(self) -> Generator[Any, None, int]:
        """Wait without blocking the event loop; result and errors as of `wait`."""
        while True:
            try:
                moved = yield from self.request.__await__()
            except AioError as error:
                self._go_on_after(error)
            else:
                self._ended()
                return moved

    def _go_on_after(self, error: AioError) -> None:
        """Return if the transfer goes on after an error; else raise that, with the path's name in it."""
        if self.request.error() is None or not self._goes_on(error, block=True):
            self._ended()
            if error.errno is not None and error.path is not None and self.path_name not in error.message:
                error.message += f"; the path is {self.path_name}"
            raise error

    def _ended(self) -> None:
        """Called once it has ended for good, with an error or without; do nothing."""

    def _goes_on(self, error: AioError, *, block: bool) -> bool:
        """Return False: what is on a path cannot be read from another."""
        return False


class PathWrite(PathRead):
    """A write to one path, or to another if that one fails; then `move` starts it again. The memory must not change
    until it is done, and is not used any more then.
    """

    __slots__ = ("_move",)

    def __init__(self, request: Request, path_name: str, move: Move) -> None:
        super().__init__(request, path_name)
        self._move: Move | None = move

    def done(self) -> bool:
        """Return whether it has ended, successfully or not; never blocks. Starts it again if it failed and can go to
        another path.
        """
        if not self.request.done():
            return False
        error = self.request.error()
        if error is not None and self._goes_on(error, block=False):
            return False
        self._ended()
        return True

    def _ended(self) -> None:
        """Let go of the memory that was written."""
        self._move = None

    def _goes_on(self, error: AioError, *, block: bool) -> bool:
        """Return whether it was started again."""
        return self._move is not None and self._move(self, error, block=block)
