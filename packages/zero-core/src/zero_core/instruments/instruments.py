"""The instruments that a configuration switches on, as the engine holds them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..monitors import Event, Monitor
from ..state import TrainingState
from ..text import mebibytes, say, table
from .communication import chosen_phases, communication_table
from .flops import FlopsProfile
from .memory import memory_rows, memory_table, present_memory

if TYPE_CHECKING:
    from zero_settings import Config

_NOTHING = nullcontext()


class Timers:
    """Sums the times of named parts on ``device``. On an accelerator each part lies between two events of the current
    stream; only `take` waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type == "cpu"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Time the block as ``part``; parts may be nested."""
        if self._on_host:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start
            return
        first, last = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        first.record()
        try:
            yield
        finally:
            last.record()
            self._events.append((part, first, last))

    def take(self) -> dict[str, float]:
        """Return the milliseconds of each part since the last call, and begin at zero again. Waits for the device."""
        for part, first, last in self._events:
            last.synchronize()
            self._seconds[part] = self._seconds.get(part, 0.0) + first.elapsed_time(last) / 1e3
        self._events.clear()
        taken = {part: seconds * 1e3 for part, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class NoTimers:
    """Timers that measure nothing."""

    def during(self, part: str) -> AbstractContextManager[None]:
        """Return a null context."""
        return _NOTHING

    def take(self) -> dict[str, float]:
        """Return an empty dict."""
        return {}


PARTS = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
"""Parts of a step; backward contains backward_inner (autograd) and backward_allreduce (reductions left after it)."""


class Instruments(Protocol):
    """Measures an engine. Call order: per micro-batch `during` around each part, `loss`; at a boundary `after_step`."""

    def during(self, part: str) -> AbstractContextManager[None]:
        """Return a context in which ``part`` runs and is measured: "forward", "backward", "backward_inner" (autograd),
        "backward_allreduce" (reductions left after it), "step", or "save", in which a save blocks training."""

    def loss(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch, divided by the accumulation steps; the step's metrics have the sum of
        these."""

    def after_step(self) -> None:
        """Write the metrics and reports of the step that has ended, taken or skipped. May wait for the device."""

    def saved(self, path: Path) -> None:
        """Note that a checkpoint in ``path`` was written, or is being written in the background."""

    def flush(self) -> None:
        """Write out all measurements so far, as someone is about to read them."""

    def close(self) -> None:
        """Write out all measurements and stop measuring."""


class NoInstruments:
    """An `Instruments` that measures nothing, where none is enabled and on other ranks than 0."""

    def during(self, part: str) -> AbstractContextManager[None]:
        """Return a null context."""
        return _NOTHING

    def loss(self, loss: torch.Tensor) -> None: ...
    def after_step(self) -> None: ...
    def saved(self, path: Path) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class ProgressLines(NoInstruments):
    """An `Instruments` for rank 0 that prints a progress line every ``steps_per_print`` steps; if null, every
    ``seconds``."""

    def __init__(self, state: TrainingState, seconds: float = 10.0) -> None:
        self._state = state
        self._seconds = seconds
        self._losses: list[torch.Tensor] = []
        self._steps = 0
        self._since = time.perf_counter()

    def loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch for the progress line, until the step ends."""
        self._losses.append(loss)

    def after_step(self) -> None:
        """Print or log the progress line if one is due, which waits for an accelerator to compute the loss."""
        self._steps += 1
        every, seconds = self._state.config.steps_per_print, time.perf_counter() - self._since
        if seconds >= self._seconds if every is None else self._state.counters.global_steps % every == 0:
            say(self._line(seconds))
            self._steps, self._since = 0, self._since + seconds
        self._losses.clear()

    def _line(self, seconds: float) -> str:
        """Return the progress line of the last step; with `timers.throughput` also samples per second over
        ``seconds``."""
        counters, config = self._state.counters, self._state.config
        loss = f"loss {sum(map(float, self._losses)):.4g}, " if self._losses else ""
        rates = ", ".join(f"{rate:.3g}" for rate in self._state.learning_rates())
        line = f"step {counters.global_steps}: {loss}gradient norm {counters.norm:.4g}, lr {rates}"
        if config.timers.throughput.enabled:
            line += f", {self._steps * self._state.sizes.train / seconds:.4g} samples per second"
        return f"{line}, skipped {counters.skipped_steps}"


class PrintingInstruments:
    """An `Instruments` for rank 0. Prints reports every ``steps_per_print`` steps, or every step if that is not a
    number. Writes metrics to ``monitor`` after each step."""

    def __init__(self, state: TrainingState, monitor: Monitor) -> None:
        config = state.config
        self._state = state
        self._monitor = monitor
        self._breakdown = config.wall_clock_breakdown
        self._memory = config.memory_breakdown
        self._timers: Timers | NoTimers = Timers(state.device) if self._breakdown else NoTimers()
        profiler = config.flops_profiler
        self._flops = FlopsProfile(profiler, state.module, state.device) if profiler.enabled else None
        self._communication = config.comms_logger.enabled
        self._phases = chosen_phases(config)
        self._open_waited = (0.0, 0.0)
        self._losses: list[torch.Tensor] = []
        self._times: dict[str, float] = {}
        self._after: dict[str, dict[str, int]] = {}
        self._micro_batches = 0
        self._progress: Instruments = ProgressLines(state) if prints_progress(config) else NoInstruments()
        self._every = config.steps_per_print if prints_progress(config) and config.steps_per_print else 1

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Run ``part`` of a step, such as "forward", in the block and time it. For forward, backward and step, where
        configured, also count operations and measure memory afterwards. A forward pass counts as a micro-batch; one
        without gradients is only run."""
        if part == "forward" and not torch.is_grad_enabled():
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(self._timers.during(part))
            if self._flops is not None and part in ("forward", "backward", "step"):
                stack.enter_context(self._flops.during(part, self._state.counters.global_steps))
            yield
        if self._memory and part in ("forward", "backward", "step"):
            self._after[part] = present_memory(self._state.device)
        self._micro_batches += part == "forward"

    def loss(self, loss: torch.Tensor) -> None:
        """Keep the loss of a micro-batch for the monitor and the progress line, until the step ends."""
        self._progress.loss(loss)
        if self._monitor.enabled:
            self._losses.append(loss)

    def after_step(self) -> None:
        """Write the step's metrics to the monitor, and print the reports that are due. May wait for the device."""
        state = self._state
        if self._monitor.enabled or self._due():
            times = self._timers.take()
            for part, milliseconds in times.items():
                self._times[part] = self._times.get(part, 0.0) + milliseconds
            if self._monitor.enabled:
                self._monitor.write_events(list(self._events(times)))
                self._losses.clear()
        if self._flops is not None:
            self._flops.after_step(state.counters.global_steps - 1, state.sizes.micro)
        self._progress.after_step()
        if self._due():
            for text in self._reports():
                say(text)
            self._times.clear()
            self._micro_batches = 0

    def saved(self, path: Path) -> None:
        """Do nothing: reports are about steps."""

    def flush(self) -> None:
        """Do nothing: reports are printed after their step."""

    def close(self) -> None:
        """Do nothing: reports are printed after their step."""

    def _due(self) -> bool:
        """Return whether reports are due after this step."""
        return self._state.counters.global_steps % self._every == 0

    def _events(self, times: dict[str, float]) -> Iterator[Event]:
        """Yield the step's metrics as events for the monitor. ``times``: milliseconds by part."""
        state, samples = self._state, self._state.counters.global_samples
        if self._losses:
            yield "Train/Samples/train_loss", sum(map(float, self._losses)), samples
        yield "Train/Samples/lr", float(state.learning_rates()[0]), samples
        if state.config.fp16.enabled:
            yield "Train/Samples/loss_scale", state.loss_scale(), samples
        for part in PARTS:
            if part in times:
                yield f"Train/Samples/elapsed_time_ms_{part}", times[part], samples

    def _reports(self) -> Iterator[str]:
        """Yield the text of each enabled report, on the steps since reports were printed last."""
        state = self._state
        if self._breakdown:
            parts = ", ".join(f"{part} {self._times[part]:.2f}" for part in PARTS if part in self._times)
            yield f"step {state.counters.global_steps}, ms of {self._micro_batches} micro-batches: {parts}"
        if self._memory:
            names = sorted({name for found in self._after.values() for name in found})
            yield table(
                ("MiB after", *names),
                [(part, *(mebibytes(found.get(n, 0)) for n in names)) for part, found in self._after.items()],
            )
            yield memory_table(memory_rows(state.partition, state.optimizer))
        if self._communication or self._breakdown:
            yield self._overlap_line()
        if self._communication:
            yield communication_table(state.ledger, self._phases, state.counters.global_steps)

    def _overlap_line(self) -> str:
        """Return a line on collectives that ended since the last such line: seconds, and overlapped fraction."""
        ledger, step = self._state.ledger, self._state.counters.global_steps
        before, self._open_waited = self._open_waited, ledger.seconds("gather", "reduce", "publish", "exchange")
        open_, waited = (max(0.0, now - then) for now, then in zip(self._open_waited, before, strict=True))
        unknown = ", not measured here" if ledger.untimed("gather", "reduce", "publish", "exchange") else ""
        hidden = f", {1 - waited / open_:.0%} hidden behind computation" if open_ else unknown
        return f"step {step}, communication: {open_:.4f} s open, {waited:.4f} s waited for{hidden}"


def prints_progress(config: Config) -> bool:
    """Return whether a run prints settings and progress: ``steps_per_print`` is null or a positive finite number."""
    return config.steps_per_print is None or 0 < config.steps_per_print < math.inf


def instruments_for(state: TrainingState, monitor: Monitor) -> Instruments:
    """Return the instruments that the configuration enables; `NoInstruments` on ranks other than 0. Raises `UsageError`
    for unknown phases in ``comms_logger``."""
    config = state.config
    chosen_phases(config)
    asked = (
        monitor.enabled,
        config.wall_clock_breakdown,
        config.memory_breakdown,
        config.flops_profiler.enabled,
        config.comms_logger.enabled,
    )
    if state.reports and any(asked):
        return PrintingInstruments(state, monitor)
    return ProgressLines(state) if state.reports and prints_progress(config) else NoInstruments()
