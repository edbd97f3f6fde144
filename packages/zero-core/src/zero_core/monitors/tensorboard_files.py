"""Numbers as TensorBoard's event files, through torch's writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from .protocol import Event


class TensorBoardMonitor:
    """Writes scalars to event files in ``folder``."""

    enabled = True

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(log_dir=str(folder))

    def write_events(self, events: Sequence[Event]) -> None:
        """Write one scalar per event; all are in the file afterwards."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
