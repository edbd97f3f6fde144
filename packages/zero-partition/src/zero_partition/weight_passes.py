"""The passes over full weights that are open, at most one of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class WeightPass:
    """One pass over full weights. ``release``: releases what it has gathered. ``ended``: what has ended it before its
    last bucket; empty while it is open."""

    release: Callable[[], object]
    ended: str = ""


class WeightPasses:
    """Ends the pass over full weights that is open, where going on would mix two states of the weights or hold more
    memory than one pass may. An iterator that a script keeps and forgets holds its unit until then only."""

    def __init__(self) -> None:
        self._open: WeightPass | None = None

    @contextmanager
    def opened(self, release: Callable[[], object]) -> Iterator[WeightPass]:
        """End any earlier pass, and return the new one for the block. Every rank calls it at the same point."""
        self.end("a further pass has begun")
        opened = self._open = WeightPass(release)
        try:
            yield opened
        finally:
            if self._open is opened:
                self._open = None

    def end(self, why: str) -> None:
        """End the open pass, if there is one, and release its units. Every rank calls it at the same point."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.ended = why
            opened.release()
