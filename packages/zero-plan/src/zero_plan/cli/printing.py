"""Tables on the terminal, or with lines of any length in a file or a pipe; progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class TextTable(NamedTuple):
    """A table with its title, the names of its columns, rows of cells, and a sentence below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def print_tables(tables: Iterable[TextTable]) -> None:
    """Print each table, and below it its note if it has one."""
    for table in tables:
        print_table(table.title, table.columns, table.rows)
        if table.note:
            print(table.note)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table of ``rows`` of cells below ``title``. Columns of numbers are aligned right, except the first. Only
    on a terminal are lines wrapped to its width.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [tuple(row) for row in rows]
    table = Table(title=Text(title), title_justify="left")
    for index, column in enumerate(columns):
        numeric = all(row[index][:1].isdigit() or not row[index] for row in rows)
        table.add_column(column, justify="right" if numeric and index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
    console.print(table)


@contextmanager
def progress(title: str) -> Iterator[None]:
    """Show a moving bar on standard error, with ``title`` and the time so far, while the block runs; show nothing if
    standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        bar.add_task(title, total=None)
        yield


def format_seconds(value: float) -> str:
    """Return ``value``, in seconds, as text with three digits in s, ms or µs: "12.3 ms"."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:,.3g} {unit}" if value * factor < 1000 else f"{value * factor:,.0f} {unit}"
    raise AssertionError("the last unit takes every value")
