"""The command `zero-nvme-aio`: probe, bench, tune, cp."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from . import __version__
from .errors import AioError

__all__ = ["main"]

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `zero-nvme-aio` with `arguments` (None: those of the process) and return its exit status: 0, 1
    after an error (one line on stderr), 130 after Ctrl-C. Arguments that the parser refuses end the program with status
    2.
    """
    options = parser().parse_args(arguments)
    action: Callable[[argparse.Namespace], None] = options.action
    try:
        action(options)
    except (AioError, _MissingExtraError) as error:
        return _print_error(str(error))
    except OSError as error:
        return _print_error(str(error) if error.filename is None else f"'{error.filename}': {error.strerror}")
    except ValueError as error:  # a setting out of range
        return _print_error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _print_error(message: str) -> int:
    """Print `message` on stderr as one line, behind the program's name; return 1, the exit status of an error."""
    print(f"zero-nvme-aio: {message}", file=sys.stderr)
    return 1


class _MissingExtraError(Exception):
    """An optional package is missing; the message says what to install."""


class _Parser(argparse.ArgumentParser):
    """Parses the command line; its message about an unknown word suggests the known word that is spelt most like it.
    Named as the private parser classes of other packages' commands.
    """

    def error(self, message: str) -> NoReturn:
        """Print the usage and `message` on stderr and exit with status 2. If the message is about an unknown choice,
        the known choice that is spelt most like it is added.
        """
        import difflib

        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(unknown[1], re.findall(r"[\w.-]+", unknown[2]), n=1) if unknown else []
        super().error(f"{message}; did you mean {near[0]!r}?" if near else message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Its result has in ``action`` the function that runs the chosen subcommand,
    which takes that result as its only argument.
    """
    parser: argparse.ArgumentParser = _Parser(
        prog="zero-nvme-aio",
        description="Fast asynchronous file I/O: look, measure, tune, copy.",
        epilog="example: zero-nvme-aio bench --path /mnt/nvme --size 4G",
    )
    parser.add_argument("--version", action="version", version=f"zero-nvme-aio {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, about: str, example: str) -> argparse.ArgumentParser:
        """Add a subcommand and return its parser. `about`: one line of help; `example`: a use of it, without the
        program's name.
        """
        made: argparse.ArgumentParser = commands.add_parser(
            name, help=about, epilog=f"example: zero-nvme-aio {example}"
        )
        return made

    probe = add("probe", "which backends run here, which is chosen, and why not the others", "probe")
    probe.set_defaults(action=_run_probe)

    about = "measure a folder's device, beside fio where it is installed"
    bench = add("bench", about, "bench --path /mnt/nvme --kind read --block 1M --depth 8 32")
    bench.add_argument("--path", required=True, help="a folder on the device; a scratch file is made and removed")
    bench.add_argument(
        "--size", type=_parse_size, default="1G", help="bytes of the scratch file, with K, M or G (default 1G)"
    )
    bench.add_argument("--kind", choices=("read", "write", "mixed"), nargs="+", default=["read", "write"])
    bench.add_argument(
        "--block",
        type=_parse_size,
        nargs="+",
        default=[_parse_size("128K"), _parse_size("1M"), _parse_size("4M")],
        metavar="BYTES",
    )
    bench.add_argument("--depth", type=int, nargs="+", default=[32])
    bench.add_argument("--threads", type=int, nargs="+", default=[2])
    bench.add_argument("--backend", nargs="+", default=["auto"], help="auto, io_uring, libaio, threads, null")
    bench.add_argument(
        "--memory", choices=("aligned", "plain"), nargs="+", default=["aligned"], help="plain memory is staged"
    )
    bench.add_argument("--buffered", action="store_true", help="through the page cache instead of direct")
    bench.add_argument("--repeat", type=int, default=3)
    bench.add_argument("--no-fio", action="store_true", help="do not measure fio beside")
    bench.add_argument("--deepspeed", action="store_true", help="measure DeepSpeed's async_io beside")
    bench.add_argument("--png", metavar="FILE", help="also plot (needs the extra `plot`)")
    bench.set_defaults(action=_run_bench)

    tune = add("tune", "find the best setting for a folder's device and remember it", "tune --path /mnt/nvme")
    tune.add_argument("--path", required=True, help="a folder on the device; a scratch file is made and removed")
    tune.add_argument("--size", type=_parse_size, default="256M", help="bytes of the scratch file (default 256M)")
    tune.add_argument("--seconds", type=float, default=45.0, help="when to stop measuring (default 45)")
    tune.add_argument("--dry-run", action="store_true", help="do not remember the result")
    tune.set_defaults(action=_run_tune)

    copy = add("cp", "copy a file through the engine", "cp /mnt/nvme/model.bin /backup/model.bin --verify")
    copy.add_argument("source", help="the file to read")
    copy.add_argument("target", help="the file to write; it is replaced if it exists")
    copy.add_argument("--verify", action="store_true", help="read the copy again and compare checksums")
    copy.add_argument("--no-sync", action="store_true", help="do not wait until the copy is on stable storage")
    copy.set_defaults(action=_run_copy)
    return parser


def _parse_size(text: str) -> int:
    """Return the bytes that a size such as 4096, 128K or 1G means (powers of 1024); ArgumentTypeError unless it is at
    least 1.
    """
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    try:
        value = int(number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a size such as 4096, 128K or 1G, got {text!r}") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a size above 0, got {text!r}")
    return value


def _run_probe(options: argparse.Namespace) -> None:
    """Print which backends run here, which one is chosen, and why not the others."""
    from ._probe import probe

    print(probe().explain())


def _rich_console() -> Any:
    """Return rich's `Console` on standard output, for tables; _MissingExtraError if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        raise _MissingExtraError("tables need rich; pip install zero-nvme-aio[cli]") from None
    return Console()


def _run_bench(options: argparse.Namespace) -> None:
    """Measure every combination of the options' settings, beside fio and DeepSpeed if they are asked for, and print a
    table; with `--png` also write a plot. _MissingExtraError if an optional package that this needs is not installed.
    """
    from . import _async_io, _fio, _sweep

    console = _rich_console()
    if options.deepspeed and not _async_io.available():
        raise _MissingExtraError("DeepSpeed is not installed; pip install deepspeed, or leave --deepspeed out")
    peers = _sweep.Peers(fio=not options.no_fio and _fio.available(), deepspeed=options.deepspeed)
    settings = _sweep.points(
        options.backend, options.block, options.depth, options.threads, options.memory, not options.buffered
    )
    with _progress("bench", None, in_bytes=False) as advance:
        rows = _sweep.sweep(options.path, settings, options.kind, options.size, options.repeat, peers, progress=advance)
    console.print(_sweep.table(rows))
    if not peers.fio and not options.no_fio:
        console.print("fio is not installed, so there is nothing to compare with")
    if options.png:
        try:
            _sweep.save_plot(rows, options.png)
        except ImportError:
            raise _MissingExtraError("plots need matplotlib; pip install zero-nvme-aio[plot]") from None


def _run_tune(options: argparse.Namespace) -> None:
    """Measure settings for the device of a folder; print each with its speeds, then the best one. Without `--dry-run`
    store that for later engines.
    """
    from ._tuning import cache_path
    from .measure import Sample, Setting
    from .tune import MEASUREMENTS, tune

    with _progress("tune", MEASUREMENTS, in_bytes=False) as advance:

        def report(setting: Setting, read: Sample, write: Sample) -> None:
            """Print a measured setting with its read and write speed, and advance the progress bar."""
            shape = f"block {setting.block_bytes >> 10:>5}K  depth {setting.queue_depth:>3}  threads {setting.threads}"
            print(f"{shape}  read {read.gb_per_s:6.2f} GB/s  write {write.gb_per_s:6.2f} GB/s")
            if advance is not None:
                advance(1)

        found = tune(
            options.path,
            file_bytes=options.size,
            budget_seconds=options.seconds,
            store=not options.dry_run,
            report=report,
        )
    print(
        f"best: {found.backend}, block_bytes={found.block_bytes}, queue_depth={found.queue_depth}, "
        f"threads={found.threads} "
        f"(read {found.read_gb_per_s:.2f}, write {found.write_gb_per_s:.2f} GB/s)"
    )
    if not options.dry_run:
        print(f"remembered in {cache_path()}; engines use it for files on this device")


def _run_copy(options: argparse.Namespace) -> None:
    """Copy the options' source to their target through an engine; with `--verify` read the copy back and compare
    checksums (ChecksumError), and without `--no-sync` wait until it is on stable storage. Raises the errors of the
    engine.
    """
    from ._copy import copy_file
    from ._engine import Engine

    total = os.path.getsize(options.source) * (2 if options.verify else 1)
    with Engine() as io, _progress(f"cp {os.path.basename(options.source)}", total) as advance:
        copy_file(
            options.source,
            options.target,
            engine=io,
            sync=not options.no_sync,
            verify=options.verify,
            progress=advance,
        )


@contextmanager
def _progress(title: str, total: int | None, *, in_bytes: bool = True) -> Iterator[Callable[..., None] | None]:
    """Return a context manager that shows a progress bar on standard error while its block runs. The bar counts up to
    `total` (None: not known yet), in bytes, or without `in_bytes` in measurements.

    It yields a function that advances the bar by its first argument; a second argument replaces the total. It yields
    None, and shows nothing, if standard error is no terminal or rich is not installed.
    """
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield None
        return
    amounts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(), TimeElapsedColumn())
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *amounts)
    # A bar's console takes the lines over, to standard error; a file or a pipe gets them as they are.
    shared = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=shared) as bar:
        task = bar.add_task(title, total=total)

        def advance(amount: int, total: int | None = None) -> None:
            """Move the bar by `amount`; a `total` replaces the bar's."""
            bar.update(task, advance=amount, total=total)

        yield advance


if __name__ == "__main__":
    raise SystemExit(main())
