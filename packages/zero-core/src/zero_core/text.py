"""Text output of the instruments: tables, numbers with units, and `say`, which prints or logs them."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Iterable, Sequence

_drawn = random.getstate()
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from zero_settings.log_level import says_progress  # noqa: E402

random.setstate(_drawn)  # rich draws a number when it is imported, and the script's generator is the script's
del _drawn

logger = logging.getLogger("zero_core")

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_WIDTH = 240  # columns; wider than any table, so that nothing wraps


def say(text: str) -> None:
    """Log ``text`` to the logger ``zero_core`` if logging is set up, else print it, unless ZERO_LOG asks for less."""
    if logger.hasHandlers():
        logger.info("%s", text)
    elif says_progress():
        print(text, flush=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with the column titles ``head`` as text: the first column aligned left, the others right."""
    made = Table(box=None, pad_edge=False)
    for number, title in enumerate(head):
        made.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, markup=False, highlight=False).print(made)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def scaled(number: float, unit: str) -> str:
    """Return ``number`` as text with a decimal prefix: ``scaled(2.5e9, "FLOP")`` is ``2.5 GFLOP``."""
    for factor, prefix in _UNITS:
        if abs(number) >= factor:
            return f"{number / factor:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def mebibytes(nbytes: float) -> str:
    """Return ``nbytes`` in MiB as text, with two decimals and without the unit."""
    return f"{nbytes / 2**20:,.2f}"
