"""Counts how often speculation guesses right, and switches it off and on by that."""

from __future__ import annotations

from collections import deque

__all__ = ["OverlapRate"]

_WINDOW = 8


class OverlapRate:
    """Counts the steps whose gradient factor was the one that speculation assumes, and the replays: steps for which it
    was another (clipped ones), or that were skipped.

    ``is_on`` becomes false once half of the last 8 steps were replays, and true again after 8 steps in a row that would
    have been none; so a run in which a step is clipped now and then does not switch at every one of them.

    Attributes:
        is_on: speculation goes on.
        steps: all steps so far.
        replays: those among them that speculation assumed wrongly, or would have.
        committed, redone, left: shards whose speculated update was taken, was computed again, and that had none.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.steps = 0
        self.replays = 0
        self.committed = 0
        self.redone = 0
        self.left = 0
        self._last: deque[bool] = deque(maxlen=_WINDOW)

    def note(self, *, replay: bool) -> None:
        """Count a step; ``replay``: speculation assumed it wrongly, or would have. Switch `is_on` if that is due."""
        self.steps += 1
        self.replays += replay
        self._last.append(replay)
        wrong = sum(self._last)
        if self.is_on and 2 * wrong >= _WINDOW:
            self.is_on = False
            self._last.clear()
        elif not self.is_on and len(self._last) == _WINDOW and not wrong:
            self.is_on = True
            self._last.clear()

    def text(self) -> str:
        """Return the counts, the rate of replays, and whether speculation is on, as one line for people."""
        rate = self.replays / self.steps if self.steps else 0.0
        return (
            f"{self.committed} updates of shards beside backward, {self.redone} computed again, {self.left} "
            f"begun at the step; replay rate {rate:.0%} of {self.steps} steps; "
            f"speculation is {'on' if self.is_on else 'off'}"
        )
