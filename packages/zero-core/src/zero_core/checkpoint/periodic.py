"""Checkpoints that `engine.step` writes by itself, after a fixed number of steps or at an interval it chooses.

[Note: automatic interval] With ``checkpoint.interval: "auto"`` rank 0 measures steps and saves, and decides. Its
decision travels with the messages that ranks exchange in a step anyway (notices.py): all save after the same step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from zero_ckpt.save_interval import ChosenInterval, IntervalChooser
from zero_settings import Config

from ..errors import UsageError
from ..state import TrainingState
from .saving import Saver

logger = logging.getLogger("zero_core")


Save = Callable[[str], object]
"""Saves a checkpoint below a folder."""


class Periodic(Protocol):
    """Decides when an engine saves by itself. Call order: `check`, `is_due` on rank 0, the step, `after_step`.
    ``root``: the folder of `resume` or of the first save; None if there was none."""

    def check(self, root: str | None) -> None:
        """Raise `UsageError` if saves are to be made and no folder for them is known."""

    def is_due(self) -> bool:
        """Return, on rank 0, whether all ranks must be told to save after the step that begins."""

    def after_step(self, save: Save, root: str | None, *, due: bool) -> None:
        """Call ``save`` with a folder if a save is due; ``due``: rank 0's `is_due`. Collective if it saves."""


class Never:
    """A `Periodic` that never saves."""

    def check(self, root: str | None) -> None:
        """Do nothing: no folder is needed."""

    def is_due(self) -> bool:
        """Return false."""
        return False

    def after_step(self, save: Save, root: str | None, *, due: bool) -> None:
        """Do nothing."""


class Fixed:
    """A `Periodic` that saves after every ``steps`` optimizer steps, below ``path`` or, if that is None, below
    ``root``: the folder of `resume` or of the first save."""

    def __init__(self, state: TrainingState, steps: int, path: str | None) -> None:
        self._state, self._steps, self._path = state, steps, path

    def check(self, root: str | None) -> None:
        """Raise `UsageError` if there is neither a ``path`` nor a ``root``."""
        require_folder(f"checkpoint.interval is {self._steps}", "checkpoint.path", self._path or root)

    def is_due(self) -> bool:
        """Return false: rank 0 need not tell the others, as every rank counts the steps itself in `after_step`."""
        return False

    def after_step(self, save: Save, root: str | None, *, due: bool) -> None:
        """Call ``save`` if the number of steps is a multiple of ``steps``; ``due`` is ignored."""
        if self._state.counters.global_steps % self._steps == 0:
            save(self._path or str(root))


class Automatic:
    """A `Periodic` that saves when rank 0's ``chooser`` finds it due; see [Note: automatic interval]. ``clock``:
    returns seconds. ``path``: the folder of the saves; if None, ``root``: that of `resume` or of the first save."""

    def __init__(
        self,
        state: TrainingState,
        saver: Saver,
        chooser: IntervalChooser,
        path: str | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state, self._saver, self._chooser, self._path, self._clock = state, saver, chooser, path, clock

    def check(self, root: str | None) -> None:
        """Raise `UsageError` if there is neither a ``path`` nor a ``root``."""
        require_folder('checkpoint.interval is "auto"', "checkpoint.path", self._path or root)

    def is_due(self) -> bool:
        """Return whether the chooser finds a save due after the step that begins; rank 0's answer counts."""
        return self._chooser.is_due()

    def after_step(self, save: Save, root: str | None, *, due: bool) -> None:
        """Report the step to the chooser. If ``due``, call ``save`` and report that save, also one that fails."""
        chooser, saver = self._chooser, self._saver
        chooser.step_ended(self._clock(), saver.take_waited())
        if chooser.saving and not saver.is_writing:
            self._save_completed()
        if not due:
            return
        chooser.save_began(self._clock())
        try:
            save(self._path or str(root))
        except Exception:
            chooser.save_failed()
            raise
        chooser.save_returned(self._clock())
        if not saver.is_writing:
            self._save_completed()

    def _save_completed(self) -> None:
        """Report to the chooser that the save is on disk; log the interval on rank 0 if it changed."""
        chosen = self._chooser.save_completed(self._clock())
        if chosen is not None and self._state.reports:
            logger.warning("%s", interval_text(chosen, self._chooser))


def require_folder(setting: str, key: str, folder: str | None) -> None:
    """Raise `UsageError` if ``folder`` is None. ``setting``: text on what needs it; ``key``: the key that names it."""
    if folder is None:
        raise UsageError(
            f"{setting}, but no folder is known: set {key}, or call engine.resume(folder) before the first step"
        )


def interval_text(chosen: ChosenInterval, chooser: IntervalChooser) -> str:
    """Return the log message on the interval that was chosen, in steps and seconds, and the reason for it."""
    step, held = chooser.step_seconds, chooser.held_seconds
    return (
        f"a checkpoint every {chosen.steps} steps ({chosen.steps * step:.3g} s): a save holds training up {held:.3g} s"
        f", a step takes {step:.3g} s; {chosen.reason}"
    )


def periodic_of(state: TrainingState, saver: Saver) -> Periodic:
    """Return the `Periodic` for ``checkpoint.interval``. Raises `UsageError` for "auto" under an mpu."""
    section = state.config.checkpoint
    check_interval(state.config, is_whole=state.model_part.place.size == 1)
    if section.interval is None:
        return Never()
    if section.interval != "auto":
        return Fixed(state, section.interval, section.path)
    hours = section.mean_time_between_failures
    chooser = IntervalChooser(section.overhead, None if hours is None else hours * 3600)
    return Automatic(state, saver, chooser, section.path)


def check_interval(config: Config, *, is_whole: bool) -> None:
    """Raise `UsageError` for interval "auto" if the model has several parts (not ``is_whole``): rank 0 decides for its
    own only."""
    if config.checkpoint.interval == "auto" and not is_whole:
        raise UsageError(
            'checkpoint.interval is "auto", which rank 0 decides for all ranks that train the same parameters; under '
            "an mpu the others would not hear of it. Write a number of steps"
        )
