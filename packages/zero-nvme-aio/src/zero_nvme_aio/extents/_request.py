"""One read or write of a store, made of engine requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from .._request import Request
from ._transfer import PathRead

__all__ = ["StoreRequest"]


class StoreRequest:
    """A read or write of a name, made of engine requests. Behaves like the engine's `Request`: `done`, `wait`,
    awaitable, safe to drop or share.

    `nbytes`: the bytes it moves. `checks`: functions that every wait calls once all requests have ended without error;
    those of a verified read compare checksums, and raise ChecksumError. `say`: called at the end of each wait; passes
    on what is new about the paths.
    """

    def __init__(
        self,
        requests: Sequence[Request | PathRead],
        nbytes: int,
        say: Callable[[], None],
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._requests = requests
        self._say = say
        self._checks = list(checks)
        self._lock = threading.Lock()
        self.nbytes = nbytes

    def done(self) -> bool:
        """Return whether all transfers have ended, successfully or not; never blocks. The bytes of a verified read may
        be used only after `wait`, which checks them and may copy some of them into place.
        """
        return all(request.done() for request in self._requests)

    def wait(self, timeout: float | None = None) -> int:
        """Block until all transfers have ended, run the checks, and return the bytes moved.

        WaitTimeoutError after `timeout` seconds (None: never); ChecksumError if a verified read finds changed bytes;
        else the first error of a transfer, raised once all of them have ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failure: OSError | None = None
        for request in self._requests:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                request.wait(left)
            except TimeoutError:
                raise
            except OSError as error:
                # The other parts still use the caller's memory: they are waited for before the first error is raised.
                failure = failure or error
        return self._end(failure)

    def __await__(self) -> Generator[Any, None, int]:
        """Wait without blocking the event loop; the result and the errors are those of `wait`. The checks run in the
        task.
        """
        failure: OSError | None = None
        for request in self._requests:
            try:
                yield from request.__await__()
            except OSError as error:
                failure = failure or error
        return self._end(failure)

    def _end(self, failure: OSError | None) -> int:
        """Call `say`, run the checks, one thread at a time, and return the bytes moved. Raise `failure`, the first
        error of a transfer, if it is not None; ChecksumError if a check fails.
        """
        if failure is not None:
            with suppress(Warning):  # warnings that are errors are less than the failure
                self._say()
            raise failure
        with self._lock:
            for check in self._checks:
                check()
        self._say()
        return self.nbytes
