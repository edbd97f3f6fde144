"""Record the times, losses, checkpoints and failures of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zero_comm import PeerError
from zero_report import RecordWriter, SpanKind
from zero_report.record.checkpoints import CheckpointEvents
from zero_report.record.planned import RunPlan

from ..instruments import Instruments
from .ledger import Running
from .memory import MemorySampler
from .tokens import TokenCount
from .units import UnitTimes

if TYPE_CHECKING:
    from ..offloading import Offloading
    from ..state import TrainingState

_KINDS = {"forward": SpanKind.FORWARD, "backward": SpanKind.BACKWARD, "step": SpanKind.UPDATE, "save": SpanKind.SAVE}


class RecordingInstruments:
    """An `Instruments` that writes times, losses, tokens, memory, checkpoints and failures to the record of ``writer``,
    and passes all calls on to ``inner``. ``close``: closes the record. ``plan``: the plan to compare the run with, if
    any."""

    def __init__(
        self,
        inner: Instruments,
        state: TrainingState,
        offloading: Offloading,
        writer: RecordWriter,
        plan: RunPlan | None,
        close: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._state = state
        self._close = close
        self._writer = writer
        self._memory = MemorySampler(state, offloading, writer, plan)
        self._checkpoints = CheckpointEvents(writer, looks=state.reports)
        self.units = UnitTimes(writer, self._memory.sample)
        self._tokens = TokenCount(state.module, state.partition.data_world_size, writer)
        self._losses: list[torch.Tensor] = []
        self._skipped = state.counters.skipped_steps
        self._open: list[tuple[SpanKind, str, float, int]] = []
        self._idle_since = time.perf_counter()
        self._failed = False
        self._save_seconds = 0.0
        self._writer.restart(state.counters.global_steps + 1)

    def under_way(self) -> Running:
        """Return the parts that run now, as spans; if none, the wait for data since the last. For any thread."""
        return self._open.copy() or [(SpanKind.DATA, "data", self._idle_since, 0)]

    def during(self, part: str) -> AbstractContextManager[None]:
        """Return a context in which ``inner`` measures ``part``; forward, backward, step and "save" are recorded."""
        kind = _KINDS.get(part)
        return self._inner.during(part) if kind is None else self._timed(part, kind)

    def loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch for the step's row in the record, which `after_step` writes."""
        self._inner.loss(loss)
        self._losses.append(loss)

    def after_step(self) -> None:
        """Write the step's row to the record: loss, gradient norm and so on; and events for a skipped step or a loss
        that is not finite. Waits for the device."""
        self._inner.after_step()
        state, writer = self._state, self._writer
        counters = state.counters
        losses, self._losses = self._losses, []
        loss = None if not losses else float(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        if loss is not None and loss - loss != 0:
            writer.note("warning", text=f"the loss is {loss}")
        skipped, self._skipped = counters.skipped_steps - self._skipped, counters.skipped_steps
        if skipped:
            writer.note("warning", text=f"step {counters.global_steps} skipped: a gradient is not finite")
        self._memory.after_step()
        self._checkpoints.look()
        writer.end_step(
            loss=loss,
            loss_min=loss,
            loss_max=loss,
            lr=float(state.learning_rates()[0]),
            grad_norm=counters.norm,
            loss_scale=state.loss_scale(),
            skipped=skipped,
            samples=state.sizes.train,
        )
        self._idle_since = time.perf_counter()

    def saved(self, path: Path) -> None:
        """Record the checkpoint in ``path``, once it is on disk."""
        self._inner.saved(path)
        self._checkpoints.saved(path, self._state.counters.global_steps, self._save_seconds)

    def flush(self) -> None:
        """Write out all measurements so far to the record's files."""
        self._writer.flush()

    def close(self) -> None:
        """Write out all measurements, close ``inner``, and close the record."""
        self._inner.close()
        self._tokens.close()
        self._checkpoints.close()
        self._close()

    @contextmanager
    def _timed(self, part: str, kind: SpanKind) -> Iterator[None]:
        """Record the block as ``part``, a span of ``kind``, while ``inner`` measures it. Before a forward pass with
        gradients, record the time outside the engine as a wait for data, and move the record to the engine's step if a
        checkpoint was loaded."""
        now = time.perf_counter()
        if part == "forward" and torch.is_grad_enabled():
            step = self._state.counters.global_steps + 1
            if self._writer.step != step:
                self._writer.restart(step)
                self._idle_since = now = time.perf_counter()
            if now > self._idle_since:
                self._writer.span(SpanKind.DATA, "data", self._idle_since, now)
            self._memory.begin_pass()
            self.units.forward()
        begin = time.perf_counter()
        if part == "backward":
            self.units.backward()  # its spans begin inside this one
        self._open.append((kind, part, begin, 0))
        try:
            with self._inner.during(part):
                yield
        except BaseException as error:
            self._end(part, kind, begin, error)
            raise
        self._end(part, kind, begin, None)

    def _end(self, part: str, kind: SpanKind, begin: float, error: BaseException | None) -> None:
        """Record that ``part``, begun at ``begin`` (`time.perf_counter`), has ended: its span, ``error`` if it is the
        engine's first, and, except for "save", a sample of memory."""
        now = time.perf_counter()
        self._open.pop()
        self._writer.span(kind, part, begin, now)
        if part == "save":
            self._save_seconds = now - begin
        else:
            self._memory.sample()
        if error is not None and not self._failed:
            self._failed = True
            facts = {"follows": True} if isinstance(error, PeerError) else {}
            self._writer.note("failure", text=f"{type(error).__name__}: {error}", **facts)
        self._idle_since = time.perf_counter()
