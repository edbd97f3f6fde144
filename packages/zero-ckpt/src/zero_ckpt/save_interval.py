"""Choose how often to save, from the measured cost of a save and the expected cost of a failure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

_STEPS, _SAVES = 64, 4
_MIN_STEPS = 5  # steps before the first save: their times are measured


@dataclass(frozen=True)
class ChosenInterval:
    """The number of ``steps`` between two saves, and the ``reason`` for it, as a clause for the log."""

    steps: int
    reason: str


def choose_interval(
    step: float, held: float, written: float, *, overhead: float, between_failures: float | None = None
) -> ChosenInterval:
    """Return the number of steps between two saves, at least 1, and the reason for it. All times are in seconds.

    ``step``: an ordinary step. ``held``: the time for which a save blocks training. ``written``: from the beginning of
    a save until it is complete on disk. The interval is the shortest in which saves block training for at most the
    fraction ``overhead``, and a save is written before the next begins (CheckFreq, Mohan et al., FAST 2021, section
    4.2). With ``between_failures``, the mean time between failures, it is at least sqrt(2 * held * between_failures),
    which minimises the time for saving and repeating lost steps (Young, 1974; Daly, 2006)."""
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
    """A save that is not complete: when it began, and the seconds for which it has blocked training so far."""

    began: float
    held: float


class IntervalChooser:
    """Measures steps and saves, and decides when to save next. ``now``: a time of `time.perf_counter`, in seconds.
    ``overhead`` and ``between_failures``: as for `choose_interval`. Attribute ``chosen``: None before the first save is
    complete.

    Call order: `is_due` before a step, `step_ended` after it; if it was due, `save_began` and `save_returned` around
    the save, then `save_completed` once all of it is on disk, or `save_failed`."""

    def __init__(self, overhead: float, between_failures: float | None) -> None:
        self._overhead, self._between_failures = overhead, between_failures
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._held: deque[float] = deque(maxlen=_SAVES)
        self._written: deque[float] = deque(maxlen=_SAVES)
        self._last_step_end: float | None = None
        self._steps_since_save = 0
        self._save: _PendingSave | None = None
        self.chosen: ChosenInterval | None = None

    @property
    def step_seconds(self) -> float:
        """Return the seconds of an ordinary step: the median of the last 64 during which no save was written."""
        return median(self._steps)

    @property
    def held_seconds(self) -> float:
        """Return the seconds for which a save blocks training: the mean of the last 4 saves that were completed."""
        return fmean(self._held)

    @property
    def saving(self) -> bool:
        """Return whether a save has begun and is not complete."""
        return self._save is not None

    def is_due(self) -> bool:
        """Return whether to save after the step that is about to be taken: after the first 5 steps, then at the chosen
        interval, but not while a save is being written."""
        if self._save is not None:
            return False
        after = self._steps_since_save + 1
        return after >= self.chosen.steps if self.chosen is not None else after >= _MIN_STEPS

    def step_ended(self, now: float, waited: float = 0.0) -> None:
        """Record a step that ended at ``now``; ``waited``: the seconds for which it waited for a save's copies.

        While a save is written, what a step takes beyond the median counts as the save's time, up to the length of one
        step, so that evaluation and other pauses of the user's script hardly count."""
        self._steps_since_save += 1
        if self._last_step_end is not None:
            taken = now - self._last_step_end
            if self._save is None:
                self._steps.append(taken)
            else:
                usual = self.step_seconds
                self._save.held += waited + min(max(0.0, taken - waited - usual), usual)
        self._last_step_end = now

    def save_began(self, now: float) -> None:
        """Record that a save began at ``now``; steps to the next save are counted from here."""
        self._save = _PendingSave(now, 0.0)
        self._steps_since_save = 0

    def save_returned(self, now: float) -> None:
        """Record that the call that saves returned at ``now``; files may still be written in the background."""
        if self._save is not None:
            self._save.held = now - self._save.began
        self._last_step_end = now

    def save_completed(self, now: float) -> ChosenInterval | None:
        """Record that the save is complete, at ``now`` or before, and choose the interval again. Return the choice if
        it is the first or differs from the last by more than a fifth; otherwise keep the last and return None."""
        save, self._save = self._save, None
        if save is None:
            return None
        self._held.append(save.held)
        self._written.append(now - save.began)
        before = self.chosen
        chosen = choose_interval(
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
        """Record that the save that began will never be complete."""
        self._save = None
