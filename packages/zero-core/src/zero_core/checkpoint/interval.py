"""Choose how often to save, from the cost of a save and of a failure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

_STEPS, _SAVES = 64, 4
_LEAST = 5  # steps before the first save: their times are measured


@dataclass(frozen=True)
class ChosenInterval:
    """``steps`` between two saves, and ``reason``, a sentence for the log."""

    steps: int
    reason: str


def choose(
    step: float, held: float, written: float, *, overhead: float, between_failures: float | None = None
) -> ChosenInterval:
    """Return how many steps lie between two saves, all times in seconds.

    ``step``: of an ordinary step. ``held``: how long a save holds training up. ``written``: from its beginning until
    all of it is on disk. The interval is the least in which saves take no more than ``overhead`` of the time and one
    is written before the next begins (CheckFreq, Mohan et al., FAST 2021, section 4.2). With ``between_failures``, the
    mean time between two failures, it is sqrt(2 * held * between_failures) where that is longer: then saving and
    repeating lost steps together take the least time (Young, 1974; Daly, 2006).
    """
    bounds = [
        (held / overhead, f"saving takes at most {overhead:.3g} of the time (checkpoint.overhead)"),
        (written, "a save is written before the next begins"),
    ]
    if between_failures is not None:
        best = math.sqrt(2 * held * between_failures)
        text = f"sqrt(2 * {held:.3g} s * {between_failures / 3600:.3g} h between failures) = {best:.3g} s (Young, Daly)"
        bounds.append((best, text))
    seconds, reason = max(bounds, key=lambda bound: bound[0])
    return ChosenInterval(max(1, math.ceil(seconds / step)), reason)


@dataclass
class _PendingSave:
    """A save that is not complete: when it began, how long it has held training up so far."""

    began: float
    held: float


class Chooser:
    """Measures steps and saves, and says when to save next. Times are `time.perf_counter`'s.

    Call order: `step_ended` after every step; when it returns True `save_began` and `save_returned` around the save;
    `save_completed` when all of it is on disk.
    """

    def __init__(self, overhead: float, between_failures: float | None) -> None:
        self._overhead, self._between_failures = overhead, between_failures
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._held: deque[float] = deque(maxlen=_SAVES)
        self._written: deque[float] = deque(maxlen=_SAVES)
        self._last: float | None = None
        self._since = 0
        self._save: _PendingSave | None = None
        self.chosen: ChosenInterval | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of an ordinary step: the median of the last ones during which nothing was written."""
        return median(self._steps)

    @property
    def held_seconds(self) -> float:
        """Seconds for which a save holds training up: the mean of the last ones."""
        return fmean(self._held)

    @property
    def saving(self) -> bool:
        """Return whether a save is not complete."""
        return self._save is not None

    def is_due(self) -> bool:
        """Return whether a save should follow the step that is about to be taken."""
        if self._save is not None:
            return False
        after = self._since + 1
        return after >= self.chosen.steps if self.chosen is not None else after >= _LEAST

    def step_ended(self, now: float, waited: float = 0.0) -> None:
        """Count a step that ended at ``now``; ``waited``: seconds of it that it waited for a save's copies.

        While a save is written, what a step takes longer than usual counts as the save's, though no more than the step
        itself: evaluation and other pauses of the user's are none of it.
        """
        self._since += 1
        if self._last is not None:
            taken = now - self._last
            if self._save is None:
                self._steps.append(taken)
            else:
                usual = self.step_seconds
                self._save.held += waited + min(max(0.0, taken - waited - usual), usual)
        self._last = now

    def save_began(self, now: float) -> None:
        """Count from here to the next save."""
        self._save = _PendingSave(now, 0.0)
        self._since = 0

    def save_returned(self, now: float) -> None:
        """The call that saves has returned; it may still be written behind training."""
        if self._save is not None:
            self._save.held = now - self._save.began
        self._last = now

    def save_completed(self, now: float) -> ChosenInterval | None:
        """Choose anew. Returns the choice when it differs from the last by a fifth, or is the first."""
        save, self._save = self._save, None
        if save is None:
            return None
        self._held.append(save.held)
        self._written.append(now - save.began)
        before = self.chosen
        chosen = choose(
            max(self.step_seconds, 1e-6),
            self.held_seconds,
            max(self._written),
            overhead=self._overhead,
            between_failures=self._between_failures,
        )
        if before is not None and abs(chosen.steps - before.steps) <= before.steps / 5:
            return None
        self.chosen = chosen
        return chosen

    def save_failed(self) -> None:
        """The save that began will not be complete."""
        self._save = None
