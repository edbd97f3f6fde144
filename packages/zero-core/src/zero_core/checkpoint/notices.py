"""Notices about checkpoints that travel with the messages of a step, so that all ranks act after the same step.

[Note: failures in the background] A background save fails on every rank, but ranks see it at different times. A rank
that raised at once would leave a rank that takes its next step waiting. So a rank announces the failure with the
messages of its next step (`Watched.announced` in zero-comm), and after that step all ranks raise their errors."""

from __future__ import annotations

from zero_comm import Control

from .in_memory import InMemory
from .periodic import Periodic
from .saving import Saver

_DUE, _SAVE_FAILED, _COPY_FAILED = 1, 2, 4


class Notices:
    """Exchanges notices (a save is due, a save failed) in the messages of a step. Call order: `before_step`, the step,
    `after_step`, `check`, `due`."""

    def __init__(self, control: Control, saver: Saver, in_memory: InMemory, periodic: Periodic) -> None:
        self._watched = control.watched
        self._saver, self._in_memory, self._periodic = saver, in_memory, periodic
        self._heard = 0

    def before_step(self, *, leads: bool) -> None:
        """Put this rank's failed saves and copies, and on rank 0 (``leads``) a due save, into the step's messages."""
        due = _DUE if leads and self._periodic.is_due() else 0
        failed = _SAVE_FAILED if self._saver.has_failed else 0
        self._watched.announced = due | failed | (_COPY_FAILED if self._in_memory.has_failed else 0)

    def after_step(self) -> None:
        """Keep the notices of all ranks, which came with the step's messages, for `check` and `due`."""
        self._heard, self._watched.announced = self._watched.heard, 0

    def check(self) -> None:
        """If any rank announced a failed save or copy, wait for this rank's, and raise its `CheckpointError`."""
        if self._heard & _SAVE_FAILED:
            self._saver.wait()
        if self._heard & _COPY_FAILED:
            self._in_memory.wait()

    @property
    def due(self) -> bool:
        """Return whether rank 0 announced that a save is due after this step."""
        return bool(self._heard & _DUE)
