"""Record warnings of the toolbox's packages, and slower fallbacks in use, as events."""

from __future__ import annotations

import logging

from zero_report import RecordWriter
from zero_settings import Config

_LOGGERS = ("zero_ckpt", "zero_comm", "zero_core", "zero_offload", "zero_partition", "DeepSpeed")


class WarningEvents(logging.Handler):
    """A logging handler that writes warnings of the toolbox's loggers to a record, between `start` and `stop`."""

    def __init__(self, writer: RecordWriter) -> None:
        super().__init__(logging.WARNING)
        self._writer = writer

    def start(self) -> None:
        """Add this handler to the packages' loggers."""
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)

    def stop(self) -> None:
        """Remove this handler from the packages' loggers."""
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one log message, a warning or worse, to the run's record. Called by `logging`."""
        self._writer.note(record.levelname.lower(), text=record.getMessage())


def note_degraded(config: Config, writer: RecordWriter) -> None:
    """Record an event if weights or optimizer are on NVMe and the fastest I/O backend does not run here."""
    zero = config.zero_optimization
    if "nvme" not in (zero.offload_param.device, zero.offload_optimizer.device):
        return
    from zero_nvme_aio import probe

    found = probe()
    best = found.backends[0]
    if not best.available and found.chosen is not None:
        writer.note(
            "degraded",
            text=f"files are read and written with {found.chosen}: {best.name} does not run here ({best.reason})",
        )
