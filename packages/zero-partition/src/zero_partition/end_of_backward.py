"""The end of a backward pass that the user has started."""

from __future__ import annotations

from collections.abc import Callable


class EndOfBackward:
    """The callback that autograd calls when its run is over, for a backward pass that the user started.

    A run that raises drops it uncalled, before the exception reaches the user; then ``failed`` is called instead.
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
