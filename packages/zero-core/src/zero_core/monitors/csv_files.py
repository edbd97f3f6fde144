"""Numbers as CSV files, one per name."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from .protocol import Event


class CsvMonitor:
    """Appends to ``folder/Train_Samples_train_loss.csv`` and so on, with the columns step and the name's last part.

    What was written is in the file at once. Raises OSError when ``folder`` cannot be written.
    """

    enabled = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write_events(self, events: Sequence[Event]) -> None:
        """Append one line per event."""
        for name, value, samples in events:
            file = self._files.get(name) or self._open(name)
            csv.writer(file, lineterminator="\n").writerow([samples, value])
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> TextIO:
        path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        file = path.open("a", encoding="utf-8", newline="")
        if file.tell() == 0:
            csv.writer(file, lineterminator="\n").writerow(["step", name.rpartition("/")[2]])
        self._files[name] = file
        return file
