"""Record the saves of an engine as events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .writer import RecordWriter


@dataclass
class _SaveEvent:
    """A save: its folder and step, when it began (`time.time`), and the seconds for which it blocked training."""

    path: Path
    step: int
    began: float
    blocked: float


class CheckpointEvents:
    """Records each save as an event of ``writer``, with its bytes and seconds.

    If this rank ``looks``, a save is recorded once it is on disk, with its seconds until then; `look` is called after
    every step to find out, so these are exact to a step. Otherwise a save is recorded at once, without bytes.
    """

    def __init__(self, writer: RecordWriter, *, looks: bool) -> None:
        self._writer = writer
        self._looks = looks
        self._pending: list[_SaveEvent] = []

    def saved(self, path: Path, step: int, blocked: float) -> None:
        """Record a save of ``step`` to the folder ``path``, or keep it until it is on disk. Call it when the save,
        which blocked training for ``blocked`` seconds, has just returned."""
        save = _SaveEvent(path, step, time.time() - blocked, blocked)
        if self._looks:
            self._pending.append(save)
            self.look()
        else:
            self._note(save, None)

    def look(self) -> None:
        """Record the saves, among those not recorded yet, that are on disk now."""
        for save in [save for save in self._pending if _is_on_disk(save)]:
            self._pending.remove(save)
            self._note(save, _size(save.path))

    def close(self) -> None:
        """Record the saves that are not recorded yet, without bytes if they are not on disk."""
        self.look()
        for save in self._pending:
            self._note(save, None)
        self._pending.clear()

    def _note(self, save: _SaveEvent, nbytes: int | None) -> None:
        """Write the event of a save; ``nbytes``: its size on disk, None if it is not known to be there."""
        seconds = save.blocked if nbytes is None else max(save.blocked, time.time() - save.began)
        facts = {"path": str(save.path), "of_step": save.step, "bytes": nbytes}
        self._writer.note("checkpoint", **facts, seconds=seconds, blocked_s=save.blocked)


def _size(folder: Path) -> int | None:
    """Return the bytes of the files in ``folder``; None if some are removed meanwhile, by another save."""
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except FileNotFoundError:
        return None


def _is_on_disk(save: _SaveEvent) -> bool:
    """Return whether the folder of a save exists and was written since the save began."""
    try:
        return save.path.stat().st_mtime >= save.began - 1
    except FileNotFoundError:
        return False
