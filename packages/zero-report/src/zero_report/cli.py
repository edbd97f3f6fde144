"""The command: `zero-report run/record` writes the page and prints its path."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from . import __version__
from .record.reader import RecordError, read_run


def parser() -> argparse.ArgumentParser:
    """Return the parser of `zero-report`'s arguments."""
    made = argparse.ArgumentParser(
        prog="zero-report",
        description="Turn a run's record into one page that shows it.",
        epilog="example: zero-report run/record --open",
    )
    made.add_argument("--version", action="version", version=f"zero-report {__version__}")
    made.add_argument("record", type=Path, help='the folder of "run_record"')
    made.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="or a folder (default: report.html in the record)"
    )
    made.add_argument("--open", action="store_true", help="open the page in a browser")
    made.add_argument("--compare", type=Path, metavar="OTHER", help="the record of another run, shown beside this one")
    made.add_argument("--perfetto", type=Path, metavar="FILE", help="write the spans of all ranks for ui.perfetto.dev")
    made.add_argument("--watch", action="store_true", help="rewrite the page until the run ends")
    made.add_argument("--live", action="store_true", help="show the run in the terminal instead")
    made.add_argument(
        "--every", type=_seconds, default=5.0, metavar="S", help="seconds between reads of the record (default 5)"
    )
    return made


def _seconds(text: str) -> float:
    """Return ``text`` of the command line as a number of seconds. Raises argparse.ArgumentTypeError unless it is above
    0."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < threading.TIMEOUT_MAX:
            return seconds
    raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command with ``arguments``, by default those of this process; return the exit status.

    That is 0, 1 with a message if there is no record or a file cannot be written, or 130 after Ctrl-C.
    """
    args = parser().parse_args(arguments)
    try:
        return _live(args) if args.live else _page(args)
    except RecordError as error:
        print(f"zero-report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"zero-report: {error.filename or 'the page'}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _live(args: argparse.Namespace) -> int:
    """Show the run in the terminal until it ends, and return the exit status 0."""
    from .live import live

    live(args.record, seconds=args.every)
    return 0


def _page(args: argparse.Namespace) -> int:
    """Write the page, print its path, and return the exit status 0. ``--perfetto`` writes the trace first, ``--open``
    shows the page in a browser, and ``--watch`` rewrites the page until the run has ended (see `Run.over`).

    Raises `RecordError` if there is no record.
    """
    from .page.report import write_report
    from .perfetto import write_perfetto

    if args.perfetto is not None:
        with _progress(f"write {args.perfetto.name}"):
            spans = write_perfetto(args.record, args.perfetto)
        print(f"{args.perfetto}: {spans:,} spans")
    refresh = args.every if args.watch else None
    with _progress(f"report of {args.record.name}"):
        path = write_report(args.record, args.output, compare=args.compare, refresh=refresh)
    print(path, flush=True)
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    while args.watch and not read_run(args.record).over:
        time.sleep(args.every)
        write_report(args.record, args.output, compare=args.compare, refresh=refresh)
    if args.watch:
        write_report(args.record, args.output, compare=args.compare)
    return 0


@contextlib.contextmanager
def _progress(title: str) -> Iterator[None]:
    """Show a moving bar on standard error, with ``title`` and the time so far, while the `with` statement runs; nothing
    where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        bar.add_task(title, total=None)
        yield
