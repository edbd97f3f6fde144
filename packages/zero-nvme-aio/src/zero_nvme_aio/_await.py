"""Awaiting a request: the progress thread writes an eventfd that the running loop watches."""

from __future__ import annotations

import asyncio
import os

from . import _native

# The kernel can refuse the write to the eventfd (a filter of system calls), so the request is looked at as well.
_LOOK_EVERY_SECONDS = 1.0


async def until_done(request: _native.Request) -> None:
    """Return when the request has ended, successfully or not; cancelling the task only stops watching it."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    fd = _native.eventfd()
    try:
        loop.add_reader(fd, _resolve, finished)
        if request.notify(fd):
            while not (finished.done() or request.done()):
                await asyncio.wait([finished], timeout=_LOOK_EVERY_SECONDS)
    finally:
        # First the native side forgets the descriptor, so that it never writes to a number that was given out again.
        request.forget_notify(fd)
        loop.remove_reader(fd)
        os.close(fd)


def _resolve(finished: asyncio.Future[None]) -> None:
    """Set the result of a future to None, unless the future has a result or was cancelled."""
    if not finished.done():
        finished.set_result(None)
