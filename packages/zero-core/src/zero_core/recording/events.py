"""Warnings of the family's packages, as events of the record."""

from __future__ import annotations

import logging

from zero_report import RecordWriter

_LOGGERS = ("zero_ckpt", "zero_comm", "zero_core", "zero_offload", "zero_partition", "DeepSpeed")


class WarningEvents(logging.Handler):
    """Notes every warning from `start` to `stop`."""

    def __init__(self, writer: RecordWriter) -> None:
        super().__init__(logging.WARNING)
        self._writer = writer

    def start(self) -> None:
        """Listen to the packages' loggers."""
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)

    def stop(self) -> None:
        """Listen no more."""
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        self._writer.note(record.levelname.lower(), text=record.getMessage())
