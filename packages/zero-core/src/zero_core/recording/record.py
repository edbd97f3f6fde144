"""`RunRecord`: records one engine's steps, collectives, transfers between tiers, units and warnings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zero_comm import Ledger
from zero_report import RecordWriter, SpanKind

from .events import WarningEvents, note_degraded
from .facts import head_facts
from .instruments import RecordingInstruments
from .ledger import RecordedLedger, Running
from .plan import load_plan

if TYPE_CHECKING:
    from zero_settings import Config

    from ..instruments import Instruments
    from ..offloading import Offloading
    from ..state import TrainingState

_UPDATE = "compute"  # the hop under which a tier's optimizer reports its kernels


class RunRecord:
    """Writes the record of one engine on this rank; of warnings from the constructor on. ``attempt``: how often the run
    was started before. Call order: `ledger` and `sink` before the model is sharded, `instruments`, `close`."""

    def __init__(self, folder: Path, config: Config, device: torch.device, attempt: int) -> None:
        self.folder = folder
        self.plan = load_plan(config, dist.get_rank())
        self._running: list[weakref.WeakMethod[Callable[[], Running]]] = []  # an engine may be dropped while we write
        self.writer: RecordWriter = RecordWriter(
            folder,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            attempt=attempt,
            facts=head_facts(config, device) if dist.get_rank() == 0 else {},
            max_bytes=config.run_record.max_bytes,
            under_way=self.under_way,
        )
        self._warnings = WarningEvents(self.writer)
        self._warnings.start()

    def under_way(self) -> Running:
        """Return the spans of collectives and parts of a step that run now. Any thread may call it."""
        sources = [source() for source in self._running]
        return [found for source in sources if source is not None for found in source()]

    def ledger(self, inner: Ledger) -> Ledger:
        """Return a ledger that records every collective and passes it on to ``inner``."""
        ledger = RecordedLedger(inner, self.writer)
        self._running.append(weakref.WeakMethod(ledger.under_way))
        return ledger

    def sink(self) -> Callable[[str, str, float, float, int, bool], None]:
        """Return the function that records transfers between tiers (`take`). Any thread may call that."""
        writer, lock = self.writer, threading.Lock()

        def take(hop: str, name: str, begin: float, end: float, nbytes: int, waited: bool) -> None:
            """Record a transfer of ``nbytes`` from ``begin`` to ``end`` (seconds), or a wait for one if ``waited``.
            ``hop``: between which tiers; ``name``: what is moved."""
            if hop == _UPDATE:
                writer.span(SpanKind.COMPUTE, name, begin, end)
                return
            drive = hop.endswith((" in", " out"))
            kind = SpanKind.TIER_WRITE if hop.endswith(" out") else SpanKind.TIER_READ
            link = f"drive, {hop}" if drive else hop
            with lock:
                waiting = end - begin if waited else 0.0
                writer.span(kind, f"{link}: {name}", begin, end, waiting, 0 if waited else nbytes)

        return take

    def instruments(self, inner: Instruments, state: TrainingState, offloading: Offloading) -> Instruments:
        """Return instruments that record and pass calls on to ``inner``, and start recording the times of units."""
        instruments = RecordingInstruments(inner, state, offloading, self.writer, self.plan, self.close)
        self._running.append(weakref.WeakMethod(instruments.under_way))
        state.partition.runtime.watch_units(instruments.units)
        note_degraded(state.config, self.writer)
        return instruments

    def close(self) -> None:
        """Stop recording warnings, write out all measurements, and close the record's files."""
        self._warnings.stop()
        self.writer.close()
