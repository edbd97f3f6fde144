"""Messages about checkpoints that travel with those of a step: all ranks act on them after the same step.

[Note: failures behind training] A save behind training fails on every rank, but ranks see it at different times. One
that raised while another takes its next step would leave that one waiting. So a rank that has seen it says so with the
messages of its next step (`Watched.announced` in zero-comm), and then all ranks raise what they have met.
"""

from __future__ import annotations

from zero_comm import Control

from .in_memory import InMemory
from .periodic import Periodic
from .saving import Saver

_DUE, _SAVE_FAILED, _COPY_FAILED = 1, 2, 4


class Notices:
    """This rank's part. Call order: `before_step`, the step, `after_step`, then `check` and `due`."""

    def __init__(self, control: Control, saver: Saver, in_memory: InMemory, periodic: Periodic) -> None:
        self._watched = control.watched
        self._saver, self._in_memory, self._periodic = saver, in_memory, periodic
        self._heard = 0

    def before_step(self, *, leads: bool) -> None:
        """Tell of failures and, on the rank that ``leads``, of a save that is due after this step."""
        due = _DUE if leads and self._periodic.is_due() else 0
        failed = _SAVE_FAILED if self._saver.has_failed else 0
        self._watched.announced = due | failed | (_COPY_FAILED if self._in_memory.has_failed else 0)

    def after_step(self) -> None:
        """Take in what all ranks have told."""
        self._heard, self._watched.announced = self._watched.heard, 0

    def check(self) -> None:
        """Raise what a save or copy behind training met, on every rank after the same step."""
        if self._heard & _SAVE_FAILED:
            self._saver.wait()
        if self._heard & _COPY_FAILED:
            self._in_memory.wait()

    @property
    def due(self) -> bool:
        """Return whether the leading rank finds a save due."""
        return bool(self._heard & _DUE)
