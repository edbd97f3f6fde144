"""Checkpoints, as events of the record."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from zero_report import RecordWriter


@dataclass
class _SaveEvent:
    path: Path
    step: int
    began: float
    blocked: float


class CheckpointEvents:
    """Notes each checkpoint when it is on disk, with its size and how long that took; rank 0 looks.

    A save that goes on behind training is looked for after every step, so that its seconds are exact to a step.
    """

    def __init__(self, writer: RecordWriter, *, looks: bool) -> None:
        self._writer = writer
        self._looks = looks
        self._pending: list[_SaveEvent] = []

    def saved(self, path: Path, step: int, blocked: float) -> None:
        """Training goes on after it was blocked for ``blocked`` seconds by a checkpoint in ``path``."""
        save = _SaveEvent(path, step, time.time() - blocked, blocked)
        if self._looks:
            self._pending.append(save)
            self.look()
        else:
            self._note(save, None)

    def look(self) -> None:
        """Note what is on disk by now."""
        for save in [save for save in self._pending if _is_there(save)]:
            self._pending.remove(save)
            self._note(save, sum(file.stat().st_size for file in save.path.rglob("*") if file.is_file()))

    def close(self) -> None:
        """Note the rest: what is not on disk by now has no size."""
        self.look()
        for save in self._pending:
            self._note(save, None)
        self._pending.clear()

    def _note(self, save: _SaveEvent, nbytes: int | None) -> None:
        seconds = save.blocked if nbytes is None else max(save.blocked, time.time() - save.began)
        facts = {"path": str(save.path), "of_step": save.step, "bytes": nbytes}
        self._writer.note("checkpoint", **facts, seconds=seconds, blocked_s=save.blocked)


def _is_there(save: _SaveEvent) -> bool:
    try:
        return save.path.stat().st_mtime >= save.began - 1
    except FileNotFoundError:
        return False
