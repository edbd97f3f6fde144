"""Detect the end of a backward pass that the user has started with ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable


class EndOfBackward:
    """A callback for autograd that calls ``end`` when its run is over, or ``failed`` when the run raises.

    A run that raises drops the callback uncalled, before the exception reaches the user.
    """

    def __init__(self, end: Callable[[], None], failed: Callable[[], None]) -> None:
        self._end = end
        self._failed: Callable[[], None] | None = failed

    def __call__(self) -> None:
        self._failed = None
        self._end()

    def __del__(self) -> None:
        if self._failed is not None:
            self._failed()
