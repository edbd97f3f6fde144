"""The pass over full weights that is open, at most one of an engine.

Such a pass is an iterator that gathers one bucket of weights after the other, for a script that reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class WeightPass:
    """One pass over full weights. ``release``: releases the units that it has gathered. ``ended``: what has ended it
    before its last bucket; "" while it is open."""

    release: Callable[[], object]
    ended: str = ""


class WeightPasses:
    """Knows the open pass over full weights, and ends it where continuing it would mix two states of the weights or
    hold more memory than one pass may. A unit gathered by an iterator that a script keeps but no longer uses is
    released then."""

    def __init__(self) -> None:
        self._open: WeightPass | None = None

    @contextmanager
    def opened(self, release: Callable[[], object]) -> Iterator[WeightPass]:
        """Open a pass that releases its units by ``release``, for the block, and give it to the block; end any earlier
        pass first. Every rank calls it at the same point."""
        self.end("a further pass has begun")
        opened = self._open = WeightPass(release)
        try:
            yield opened
        finally:
            if self._open is opened:
                self._open = None

    def end(self, why: str) -> None:
        """End the open pass, if there is one, and release its units. ``why``: what ends it, stored as
        `WeightPass.ended`. Every rank calls it at the same point."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.ended = why
            opened.release()
