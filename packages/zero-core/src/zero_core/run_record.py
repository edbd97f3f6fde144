"""The record of a run, as `zero_report` reads it: what the engine's instruments, ledger and tiers tell is written down.

Nothing of `zero_report` is imported, and no thread runs, unless ``run_record.path`` or the environment variable
`RECORD_VARIABLE` names a folder.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from zero_comm import Ledger, Tag

from .errors import UsageError
from .instruments import Instruments, memory_rows

if TYPE_CHECKING:
    from zero_report import Kind, RecordWriter, Report

    from .config import Config
    from .offloading import Offloading
    from .state import TrainingState

RECORD_VARIABLE = "ZERO_RUN_RECORD"
_OWNERS = {
    "gathered parameters": "gathered",
    "parameter shards": "parameters",
    "secondary shards": "parameters",
    "placeholders": "parameters",
    "masters": "masters",
    "gradients": "gradients",
    "optimizer states": "states",
}
_MEMORY_PAUSE = 500  # steps look at memory when this many times the cost of looking has passed
_PENDING = 64  # messages of one name whose end is awaited


def record_folder(config: Config) -> Path | None:
    """Return where the record goes; None when none is asked for."""
    named = config.run_record.path or os.environ.get(RECORD_VARIABLE)
    return Path(named) if named else None


def open_record(config: Config, device: torch.device) -> RunRecord | None:
    """Return this rank's open record; None when none is asked for. Collective where one is."""
    folder = record_folder(config)
    if folder is None:
        return None
    from zero_report import next_attempt

    attempt = torch.zeros(1, dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        attempt.fill_(next_attempt(folder))
    if dist.get_world_size() > 1:
        dist.broadcast(attempt, 0)
    return RunRecord(folder, config, int(attempt))


class RunRecord:
    """Writes what one engine tells.

    Call order: `ledger` and `sink` before the model is sharded, `instruments`, `close`.
    """

    def __init__(self, folder: Path, config: Config, attempt: int) -> None:
        from zero_report import RecordWriter

        self.folder = folder
        self.writer: RecordWriter = RecordWriter(
            folder,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            attempt=attempt,
            facts=_facts(config) if dist.get_rank() == 0 else {},
            max_bytes=config.run_record.max_bytes,
        )

    def ledger(self, inner: Ledger) -> Ledger:
        """Return a ledger that also writes down every collective; ``inner`` may say them."""
        return _RecordedLedger(inner, self.writer)

    def sink(self) -> Callable[[str, str, float, float, int, bool], None]:
        """Return what takes the transfers between tiers."""
        from zero_report import Kind

        writer = self.writer

        def take(hop: str, name: str, begin: float, end: float, nbytes: int, waited: bool) -> None:
            if hop == "compute":
                return
            drive = hop.endswith((" in", " out"))
            kind = Kind.TIER_WRITE if hop.endswith(" out") else Kind.TIER_READ
            link = f"drive, {hop}" if drive else hop
            writer.span(kind, f"{link}: {name}", begin, end, end - begin if waited else 0.0, 0 if waited else nbytes)

        return take

    def instruments(self, inner: Instruments, state: TrainingState, offloading: Offloading) -> Instruments:
        """Return instruments that also write down what they are told."""
        return _RecordingInstruments(inner, state, offloading, self)

    def close(self) -> None:
        """Write the rest and end the record."""
        self.writer.close()


def report_of(config: Config, instruments: Instruments) -> Report:
    """Return the page of the run so far, which ``instruments`` may be recording. Raises `UsageError` where nothing is
    recorded."""
    folder = record_folder(config)
    if folder is None:
        raise UsageError(
            'engine.report(): nothing is recorded; add "run_record": {"path": "run/record"} to the configuration'
        )
    from zero_report import make_report

    if isinstance(instruments, _RecordingInstruments):
        instruments.record.writer.flush()
    return make_report(folder)


class _RecordedLedger(Ledger):
    """Counts as a ledger does; each collective becomes a span when it is over."""

    def __init__(self, inner: Ledger, writer: RecordWriter) -> None:
        from zero_report import Kind

        super().__init__()
        self._inner = inner
        self._writer = writer
        self._kinds: Mapping[str, Kind] = {kind.name.lower(): kind for kind in Kind}
        self._pending: dict[tuple[str, str], deque[int]] = {}

    def count(self, tag: Tag, sent_bytes: int, across_bytes: int = 0) -> None:
        """Add one collective that sends ``sent_bytes`` bytes from this rank."""
        super().count(tag, sent_bytes, across_bytes)
        self._inner.count(tag, sent_bytes, across_bytes)
        self._writer.count("collectives", 1)
        self._writer.count("sent_bytes", sent_bytes)
        self._writer.count("across_bytes", across_bytes)
        self._pending.setdefault((tag.phase, tag.name), deque(maxlen=_PENDING)).append(sent_bytes)

    def arrived(self, tag: Tag, open_seconds: float, waited_seconds: float) -> None:
        """Add that a collective is over."""
        now = time.perf_counter()
        super().arrived(tag, open_seconds, waited_seconds)
        pending = self._pending.get((tag.phase, tag.name))
        nbytes = pending.popleft() if pending else 0
        self._writer.span(self._kinds[tag.phase], tag.name, now - open_seconds, now, waited_seconds, nbytes)


class _RecordingInstruments:
    """Hands everything on to the instruments that the configuration asks for; writes down times, loss and memory."""

    def __init__(
        self, inner: Instruments, state: TrainingState, offloading: Offloading, record: RunRecord
    ) -> None:
        from zero_report import Kind

        self._inner = inner
        self._state = state
        self._offloading = offloading
        self.record = record
        self._kinds = {
            "forward": Kind.FORWARD,
            "backward": Kind.BACKWARD,
            "step": Kind.UPDATE,
            "save": Kind.SAVE,
        }
        self._data = Kind.DATA
        self._process = psutil.Process()
        self._losses: list[torch.Tensor] = []
        self._skipped = state.counters.skipped_steps
        self.idle_since = time.perf_counter()
        self._memory_due = 0.0
        self._looked = 0.0
        self._buffers = sum(buffer.nbytes for buffer in state.module.buffers())
        self._failed = False
        self._save_seconds = 0.0
        record.writer.restart(state.counters.global_steps + 1)

    def during(self, part: str) -> AbstractContextManager[None]:
        """Surround one of `PARTS`, or ``save``."""
        kind = self._kinds.get(part)
        return self._inner.during(part) if kind is None else _Part(self, part, kind, self._inner.during(part))

    def loss(self, loss: torch.Tensor) -> None:
        """Keep a loss until the step is over."""
        self._inner.loss(loss)
        self._losses.append(loss)

    def after_step(self) -> None:
        """End the step's row."""
        self._inner.after_step()
        state = self._state
        loss = float(torch.stack(self._losses).sum()) if self._losses else None
        self._losses.clear()
        if loss is not None and loss - loss != 0:
            self.record.writer.note("warning", text=f"the loss is {loss}")
        skipped, self._skipped = state.counters.skipped_steps - self._skipped, state.counters.skipped_steps
        if skipped:
            self.record.writer.note("warning", text="step skipped: a gradient is not finite")
        if self._looked:
            self._memory_due = time.perf_counter() + _MEMORY_PAUSE * self._looked
            self._looked = 0.0
        self.record.writer.end_step(
            loss=loss,
            loss_min=loss,
            loss_max=loss,
            lr=float(state.learning_rates()[0]),
            grad_norm=state.counters.norm,
            loss_scale=state.loss_scale(),
            skipped=skipped,
            samples=state.sizes.train,
        )
        self.idle_since = time.perf_counter()

    def saved(self, path: Path) -> None:
        """Note a checkpoint; its size as far as rank 0 finds it on disk already."""
        self._inner.saved(path)
        nbytes = None
        if self._state.reports and path.is_dir():
            nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self.record.writer.note(
            "checkpoint", path=str(path), bytes=nbytes, seconds=self._save_seconds, blocked_s=self._save_seconds
        )

    def close(self) -> None:
        """End the record."""
        self._inner.close()
        self.record.close()

    def begin(self, part: str) -> None:
        """Note what passed before a forward pass, outside the engine; go on at the step of a checkpoint just loaded."""
        if part == "forward" and torch.is_grad_enabled():
            step = self._state.counters.global_steps + 1
            if self.record.writer.step != step:
                self.record.writer.restart(step)
                self.idle_since = time.perf_counter()
            now = time.perf_counter()
            if now > self.idle_since:
                self.record.writer.span(self._data, "data", self.idle_since, now)

    def end(self, part: str, kind: Kind, begin: float, error: BaseException | None) -> None:
        """Note a part that is over."""
        now = time.perf_counter()
        self.record.writer.span(kind, part, begin, now)
        if part == "save":
            self._save_seconds = now - begin
        if error is not None and not self._failed:
            self._failed = True
            self.record.writer.note("failure", text=f"{type(error).__name__}: {error}")
        if now >= self._memory_due and part != "save":
            self._look()
        self.idle_since = time.perf_counter()

    def _look(self) -> None:
        """Note who holds memory now; looking takes at most one part in `_MEMORY_PAUSE` of the run."""
        begin = time.perf_counter()
        state = self._state
        on_host = state.device.type == "cpu"
        owners: dict[str, int] = {}
        held = 0
        for row in memory_rows(state.partition, state.optimizer):
            if row.tier != "nvme":
                owners[_OWNERS[row.kind]] = owners.get(_OWNERS[row.kind], 0) + row.nbytes
                held += row.nbytes if on_host or row.tier == "device" else 0
        activations = {tier: nbytes for tier, nbytes in self._offloading.memory().items() if tier != "nvme"}
        owners["activations"] = sum(activations.values())
        owners["buffers"] = self._buffers
        process = self._process.memory_info().rss
        device = None if on_host else torch.accelerator.memory_allocated(state.device)
        counted = held + self._buffers + (owners["activations"] if on_host else 0)
        owners["other"] = max(0, (process if device is None else device) - counted)
        self.record.writer.memory(owners, process=process, device=device)
        self._looked += time.perf_counter() - begin


class _Part:
    """One part of a step, around which something else may be timed too."""

    __slots__ = ("_begin", "_inner", "_kind", "_of", "_part")

    def __init__(self, of: _RecordingInstruments, part: str, kind: Kind, inner: AbstractContextManager[None]) -> None:
        self._of, self._part, self._kind, self._inner = of, part, kind, inner

    def __enter__(self) -> None:
        self._of.begin(self._part)
        self._begin = time.perf_counter()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        handled = self._inner.__exit__(kind, error, trace)
        self._of.end(self._part, self._kind, self._begin, error)
        return handled


def _facts(config: Config) -> dict[str, Any]:
    """The head of the record: title, configuration with the origin of every value, versions, machine."""
    secret = ("comet.",)
    rows = [row for row in config.report() if not row.path.startswith(secret)]
    return {
        "title": Path(sys.argv[0]).name or "run",
        "configuration": [[row.path, _plain(row.value), row.provenance, row.note] for row in rows],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        },
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
