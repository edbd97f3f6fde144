"""Measure a run: times, operations, bytes, memory, metrics. Read `instruments.py` first; each other file measures one
thing."""

from __future__ import annotations

from ..text import say
from .communication import PrintingLedger, communication_table, ledger_for
from .instruments import PARTS, Instruments, NoInstruments, NoTimers, Timers, instruments_for, prints_progress
from .memory import MEMORY_KINDS, MemoryRow, memory_rows, memory_table

__all__ = [
    "Instruments",
    "MEMORY_KINDS",
    "MemoryRow",
    "NoTimers",
    "PARTS",
    "NoInstruments",
    "PrintingLedger",
    "Timers",
    "communication_table",
    "instruments_for",
    "ledger_for",
    "memory_rows",
    "memory_table",
    "prints_progress",
    "say",
]
