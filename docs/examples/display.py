"""What rank 0 shows while it trains: a live panel on a terminal, plain lines elsewhere, and a metrics file."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import psutil
import torch.distributed as dist
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import zero_core

BARS = "▁▂▃▄▅▆▇█"
LINE_SECONDS = 5.0  # without a terminal, one line in this time


class Display:
    """Shows and records one training run; does nothing on ranks other than 0.

    The curve begins with the losses that an earlier part of the run left in ``metrics``: one scale over a resume.
    `show` appends one JSON line there: step, world_size, loss, lr, tokens_per_second, model_state (bytes that this rank
    holds between steps, by kind) and resident (bytes of the process).
    """

    def __init__(self, engine: zero_core.Engine, metrics: Path, *, last_step: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._last_step = last_step
        self._active = dist.get_rank() == 0
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._losses = earlier_losses(metrics, engine.global_steps) if self._active else []
        self._times: deque[float] = deque(maxlen=20)
        self._next_line = 0.0

    def __enter__(self) -> Display:
        if self._active:
            self._metrics.parent.mkdir(parents=True, exist_ok=True)
            self._times.append(time.monotonic())
            if self._live is not None:
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active and self._live is not None:
            self._live.stop()

    def show(self, loss: float, *, tokens: int) -> None:
        """Report one optimizer step: the mean loss over the ranks, and how many tokens all ranks learned from."""
        if not self._active:
            return
        self._losses.append(loss)
        self._times.append(time.monotonic())
        facts = {
            "step": self._engine.global_steps,
            "world_size": dist.get_world_size(),
            "loss": loss,
            "lr": self._engine.get_lr()[0],
            "tokens_per_second": tokens * (len(self._times) - 1) / (self._times[-1] - self._times[0]),
            "model_state": self._engine.memory_report(),
            "resident": psutil.Process().memory_info().rss,
        }
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
        if self._live is not None:
            self._live.update(self._panel(facts))
        elif self._times[-1] >= self._next_line or facts["step"] == self._last_step:
            self._next_line = self._times[-1] + LINE_SECONDS
            self._console.print("  ".join(f"{name} {value}" for name, value in self._rows(facts)), soft_wrap=True)

    def _rows(self, facts: dict) -> list[tuple[str, str]]:
        return [
            ("step", f"{facts['step']}/{self._last_step}"),
            ("loss", f"{facts['loss']:.3f}"),
            ("left", self._time_left(facts["step"])),
            ("tokens/s", f"{facts['tokens_per_second']:,.0f}"),
            ("model state", f"{sum(facts['model_state'].values()) / 1e6:.0f} MB"),
            ("process", f"{facts['resident'] / 1e6:.0f} MB"),
            ("lr", f"{facts['lr']:.2e}"),
        ]

    def _time_left(self, step: int) -> str:
        """Minutes and seconds to the last step, at the speed of the last steps."""
        each = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        minutes, seconds = divmod(round(each * (self._last_step - step)), 60)
        return f"{minutes}:{seconds:02d}"

    def _panel(self, facts: dict) -> Panel:
        rows = self._rows(facts)
        table = Table.grid(padding=(0, 2))
        for _ in rows:
            table.add_column(min_width=8)
        table.add_row(*(Text(name, style="dim") for name, _ in rows))
        table.add_row(*(Text(value, style="bold") for _, value in rows))
        bar = ProgressBar(total=self._last_step, completed=facts["step"])
        engine = self._engine
        ranks = facts["world_size"]
        title = f"GPT · ZeRO stage {engine.zero_optimization_stage()} · {ranks} rank{'s' if ranks > 1 else ''}"
        return Panel(Group(table, Text(sparkline(self._losses, 72), style="cyan"), bar), title=title, width=80)


def earlier_losses(metrics: Path, step: int) -> list[float]:
    """The losses in a metrics file up to ``step``; none if there is no such file."""
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    rows = map(json.loads, lines)
    return [row["loss"] for row in rows if row["step"] <= step]


def sparkline(values: list[float], width: int) -> str:
    """A curve of at most ``width`` characters, each the mean of its share of ``values``."""
    count = min(width, len(values))
    means = []
    for column in range(count):
        part = values[len(values) * column // count : len(values) * (column + 1) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for mean in means)
