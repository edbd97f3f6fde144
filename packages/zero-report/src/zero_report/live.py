"""A view of a run in the terminal, updated from its record while the run continues."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .analysis.analyse import analyse
from .page.curves import curves
from .page.figures import totals
from .record.parsing import Array
from .record.reader import RecordError, Run, read_run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48


def live(
    record: str | Path, *, seconds: float = 2.0, rounds: int | None = None, console: Console | None = None
) -> None:
    """Show a run in the terminal until it has ended (see `Run.over`); read its record again every ``seconds`` seconds.

    Waits for a record that does not exist yet, without a limit. ``rounds``: how many times to read it at most; None for
    no limit. ``console``: where to show it, by default standard output.
    """
    shown = console or Console()
    with Live(console=shown, refresh_per_second=4) as display:
        while True:
            try:
                run = read_run(record)
                display.update(view(run))
                over = run.over
            except RecordError:
                display.update(_printable_text(f"waiting for a record in {record}"))
                over = False
            rounds = None if rounds is None else rounds - 1
            if over or rounds == 0:
                return
            time.sleep(seconds)


def view(run: Run) -> RenderableType:
    """Return the terminal view of ``run``, a panel for rich, titled with the record's path.

    It shows the verdict; the number of steps and the milliseconds of one; once a step is recorded the loss, the tokens
    (or else samples) per second and the process's memory, each with its last value and a line of bars; at most three
    causes of waiting, as a percentage of the step and a bar; and how the run ended, if it has.
    """
    found, drawn = totals(run), curves(run)
    judged = analyse(run)
    table = Table.grid(padding=(0, 2))
    table.add_row("step", f"{found['steps']:,.0f}", f"{found['step_seconds'] * 1e3:,.1f} ms per step")
    if len(drawn["step"]):
        table.add_row("loss", _last_value_text(drawn["loss"]), _sparkline(drawn["loss"]))
        rate = drawn["tokens"] if np.nansum(drawn["tokens"]) else drawn["samples"]
        with np.errstate(invalid="ignore", divide="ignore"):
            speed = rate / drawn["seconds"]
        unit = "tokens/s" if np.nansum(drawn["tokens"]) else "samples/s"
        table.add_row(unit, _last_value_text(speed), _sparkline(speed))
        table.add_row("memory", f"{found['process_bytes'] / 2**30:.2f} GiB", _sparkline(drawn["process"]))
    for share in judged.causes.by_kind[:3]:
        bar = "█" * round(share.share * _WIDTH / 2)
        table.add_row({"tier": "tiers", "link": "links"}.get(share.kind, share.kind), f"{share.share:.0%}", bar)
    lines: list[RenderableType] = [_printable_text(judged.verdict.sentence, "bold"), table]
    if judged.verdict.ended:
        lines.append(_printable_text(judged.verdict.ended, "dim"))
    return Panel(Group(*lines), title=_printable_text(str(run.path)), expand=False)


def _printable_text(words: str, style: str = "") -> Text:
    """Return ``words`` for rich, in which characters that control a terminal are question marks."""
    return Text("".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in words), style=style)


def _sparkline(values: Array) -> str:
    """Return a line of bars for at most `_WIDTH` evenly spread values, without NaN; empty if there are none."""
    known = np.asarray(values)[~np.isnan(values)]
    if not len(known):
        return ""
    chosen = known[np.linspace(0, len(known) - 1, min(_WIDTH, len(known))).astype(int)]
    low, high = float(chosen.min()), float(chosen.max())
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((float(value) - low) * scale)] for value in chosen)


def _last_value_text(values: Array) -> str:
    """Return the last of ``values`` that is not NaN as text with four significant digits; a dash if there is none."""
    known = np.asarray(values)[~np.isnan(values)]
    return f"{known[-1]:,.4g}" if len(known) else "–"
