"""The command `zero-launch doctor`: what every host of a job has, and what will go wrong with it."""

from __future__ import annotations

import argparse
import importlib.metadata
import queue
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_launch.facts import examination
from zero_launch.hostfile import Hostfile
from zero_launch.peers import Inbox, Listener, Peer, call
from zero_launch.transport import Transport

_ANSWER_SECONDS = 90.0
_SKEW_SECONDS = 1.0
_LITTLE_SHARED_MEMORY = 1 << 30
_LITTLE_MEMLOCK = 4 << 20


@dataclass(frozen=True)
class HostReport:
    """One host's answer, or why there is none.

    ``facts``: as `examination` returns them; None without an answer. ``trouble``: the reason then. ``skew``: seconds
    that this clock is ahead of the host's. ``shared_folder``: whether it shares this working directory; None if
    unknown.
    """

    host: str
    facts: Mapping[str, Any] | None = None
    trouble: str = ""
    skew: float = 0.0
    shared_folder: bool | None = None


def main(argv: Sequence[str]) -> int:
    """Examine the hosts that the command line names, print a table of them, and return 0, or 1 when something in it
    stops a job.

    ``argv``: the words after `doctor`. With `--swap` it calls `leftovers` instead. Raises ValueError for a wrong
    hostfile, filter or option, FileNotFoundError if the hostfile or the launcher's program is missing, and SystemExit
    for words that argparse refuses, or `--help`.
    """
    parser = argparse.ArgumentParser(
        prog="zero-launch doctor",
        description="Look at every host of a job before it starts. Exit status 1 when something would stop it.",
        epilog="example: zero-launch doctor --hostfile hosts",
        allow_abbrev=False,
    )
    parser.add_argument("-H", "--hostfile", metavar="FILE", help="the hosts; without it, this machine")
    parser.add_argument("-i", "--include", default="", metavar="SPEC")
    parser.add_argument("-e", "--exclude", default="", metavar="SPEC")
    parser.add_argument("--launcher", default="ssh", choices=("ssh", "pdsh", "local"))
    parser.add_argument("--launcher_args", default="", metavar="ARGS")
    parser.add_argument("--ssh_port", type=int, metavar="PORT")
    parser.add_argument("--local", action="store_true", help="this machine only")
    parser.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="DIR",
        help="only look here (nvme_path; once per folder of the job) for files of killed ranks, on this machine",
    )
    parser.add_argument("--remove", action="store_true", help="with --swap: remove them")
    options = parser.parse_args(argv)
    if options.remove and not options.swap:
        raise ValueError("--remove needs --swap DIR: the folders of nvme_path")
    if options.swap:
        return leftovers(options.swap, options.remove)
    if options.local or options.hostfile is None:
        with _progress("this machine", None):
            reports = [HostReport("this machine", examination(str(Path.cwd())))]
    else:
        hosts = Hostfile.read(options.hostfile).select(include=options.include, exclude=options.exclude)
        transport = Transport(options.launcher, tuple(shlex.split(options.launcher_args)), options.ssh_port)
        transport.check()
        with _progress("hosts", len(hosts.hosts)) as advance:
            reports = examine(hosts, transport, answered=advance)
    problems, remarks = diagnose(reports)
    _print_report(reports, problems, remarks)
    return 1 if problems else 0


def leftovers(folders: Sequence[str], remove: bool) -> int:
    """Print which swap files killed ranks left in ``folders``, and delete them if ``remove``; return 1 when some are
    left, else 0.

    Packages that write such files register a function by the entry point `zero_launch.leftovers`: it gets both
    arguments, and returns a line of text per file. Raises ValueError when no installed package does.
    """
    finders = importlib.metadata.entry_points(group="zero_launch.leftovers")
    if not finders:
        raise ValueError("--swap: no package that writes swap files is installed; run: pip install zero-nvme-aio")
    lines = [line for finder in finders for line in finder.load()(folders, remove)]
    print("\n".join(lines) or f"nothing of a killed process in {', '.join(folders)}")
    return 1 if lines and not remove else 0


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Callable[[int], None] | None]:
    """Context manager: show a progress bar on standard error, with ``title`` and the time so far. ``total``: number of
    hosts; None for a bar without an end.

    Yields a function that sets the number of hosts that have answered; None where standard error is no terminal, and
    no bar is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    count = () if total is None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *count, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=total)
        yield lambda answered: bar.update(task, completed=answered)


def examine(
    hosts: Hostfile, transport: Transport, *, answered: Callable[[int], None] | None = None
) -> list[HostReport]:
    """Ask all ``hosts`` for their facts over ``transport``, and return their reports in the hosts' order, with whether
    each host shares this working directory.

    The hosts are asked at the same time, and have 90 s to answer; one that does not gets a report with a trouble. A
    file in this working directory, which is removed at the end, shows whether it is shared. ``answered`` is called
    with the number of hosts that have a report, after each message.
    """
    inbox: Inbox = queue.SimpleQueue()
    peers = {name: Peer(name, slots) for name, slots in hosts.hosts.items()}
    listener = None if transport.carries_input else Listener(inbox)
    file = Path.cwd() / f".zero-launch-doctor-{secrets.token_hex(4)}"
    mark: Path | None = file
    try:
        file.touch()
    except OSError:
        mark = None  # not writable here: whether it is shared stays open
    reports: dict[str, HostReport] = {}
    try:
        for peer in peers.values():
            call(peer, transport, inbox, listener)
        end = time.monotonic() + _ANSWER_SECONDS
        while len(reports) < len(peers) and time.monotonic() < end:
            try:
                name, message = inbox.get(timeout=0.5)
            except queue.Empty:
                continue
            _handle_answer(peers[name], message, transport, mark, reports)
            if answered is not None:
                answered(len(reports))
    finally:
        for peer in peers.values():
            peer.close()
        if listener is not None:
            listener.close()
        if mark is not None:
            mark.unlink(missing_ok=True)
    return [reports.get(name, HostReport(name, trouble=f"no answer within {_ANSWER_SECONDS:.0f} s")) for name in peers]


def _handle_answer(
    peer: Peer, message: Mapping[str, Any], transport: Transport, mark: Path | None, reports: dict[str, HostReport]
) -> None:
    """Handle one message of a host: answer a hello by asking for the host's facts; for the facts, and for the end of
    the connection, put the host's report into ``reports`` (by host name). Do nothing for a host that has a report.

    ``mark``: the file that the host is to look for, which shows whether the folder is shared; None to leave that open.
    """
    if peer.name in reports:
        return
    if message["kind"] == "hello":
        peer.send("examine", mark=None if mark is None else str(mark))
    elif message["kind"] == "examination":
        offset = 0.0 if peer.channel is None else peer.channel.clock_offset
        reports[peer.name] = HostReport(peer.name, message["facts"], skew=offset, shared_folder=message["sees_mark"])
    elif message["kind"] == "eof":
        status = peer.exit_status()
        why = message["why"] if status is None else transport.explain(status)
        reports[peer.name] = HostReport(peer.name, trouble="; ".join([why, *list(peer.errors)[-2:]]))


def diagnose(reports: Sequence[HostReport]) -> tuple[list[str], list[str]]:
    """Return two lists of texts about the hosts: problems, which stop a job, and remarks.

    Problems are hosts without an answer, versions that differ between hosts, no torch, and no free port.
    """
    problems = [f"{r.host}: {r.trouble}" for r in reports if r.facts is None]
    remarks = []
    there = [(r, r.facts) for r in reports if r.facts is not None]
    for what in ("python", *sorted({name for _, facts in there for name in facts["versions"]})):
        values = {r.host: str(facts.get(what) or facts["versions"].get(what, "not installed")) for r, facts in there}
        if len(set(values.values())) > 1:
            problems.append(f"{what} differs: " + ", ".join(f"{host} {value}" for host, value in values.items()))
    for r, facts in there:
        if "torch_error" in facts:
            problems.append(f"{r.host}: torch cannot be imported: {facts['torch_error']}")
        if facts["free_port"] is None:
            problems.append(f"{r.host}: no free TCP port")
        if abs(r.skew) > _SKEW_SECONDS:
            remarks.append(f"{r.host}: its clock is off by {-r.skew:+.1f} s; logs of several hosts will not line up")
        if facts["shared_memory_free"] is not None and facts["shared_memory_free"] < _LITTLE_SHARED_MEMORY:
            remarks.append(f"{r.host}: {_size(facts['shared_memory_free'])} free in /dev/shm; data loaders want more")
        if facts["memlock"] is not None and facts["memlock"] < _LITTLE_MEMLOCK:
            remarks.append(f"{r.host}: only {_size(facts['memlock'])} may be locked (ulimit -l); NVMe I/O stages less")
        if r.shared_folder is False:
            remarks.append(f"{r.host}: the working directory is not shared; checkpoints stay on each host")
    counts = {len(facts["devices"]) for _, facts in there}
    if len(counts) > 1:
        remarks.append("hosts have different numbers of devices: " + ", ".join(map(str, sorted(counts))))
    return problems, remarks


def _print_report(reports: Sequence[HostReport], problems: Sequence[str], remarks: Sequence[str]) -> None:
    """Print a table with a column per host, then ``problems`` and ``remarks``, one per line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False)  # what hosts say may have brackets
    table = Table(title="hosts of the job", title_justify="left")
    table.add_column("")
    for r in reports:
        table.add_column(r.host, overflow="fold")
    for label, cell in _table_rows():
        table.add_row(label, *(cell(r) if r.facts is not None else "-" for r in reports))
    console.print(table)
    for text in problems:
        console.print(Text.assemble(("problem", "red"), f" {text}"))
    for text in remarks:
        console.print(Text.assemble(("note", "yellow"), f" {text}"))
    if not problems:
        console.print("nothing here stops a job")


def _table_rows() -> list[tuple[str, Any]]:
    """Return the rows of the table: (label, function of a `HostReport` with facts that returns the text of its
    cell)."""

    def fact(name: str) -> Any:
        """Return the cell function of the fact ``name``, shown as it is."""
        return lambda r: str(r.facts[name])

    def size(name: str, otherwise: str = "") -> Any:
        """Return the cell function of the fact ``name``, a number of bytes; ``otherwise`` is shown for None."""
        return lambda r: otherwise if r.facts[name] is None else _size(r.facts[name])

    def listing(name: str) -> Any:
        """Return the cell function of the fact ``name``, a list of texts; `none` is shown for an empty one."""
        return lambda r: ", ".join(r.facts[name]) or "none"

    return [
        ("host name", fact("hostname")),
        ("address", lambda r: r.facts["address"] or "local"),
        ("python", lambda r: f"{r.facts['python']}\n{r.facts['executable']}"),
        ("packages", lambda r: "\n".join(f"{name} {version}" for name, version in r.facts["versions"].items())),
        ("clock", lambda r: f"{-r.skew:+.3f} s"),
        ("cores", fact("cores")),
        ("memory free", lambda r: f"{_size(r.facts['memory_free'])} of {_size(r.facts['memory'])}"),
        ("/dev/shm free", size("shared_memory_free", "none")),
        ("memlock", size("memlock", "unlimited")),
        ("open files", fact("open_files")),
        ("free port", fact("free_port")),
        ("disk free here", size("disk_free")),
        ("shared folder", lambda r: {None: "-", True: "yes", False: "no"}[r.shared_folder]),
        ("devices", listing("devices")),
        ("backends", listing("backends")),
        ("I/O engine", fact("io_engine")),
    ]


def _size(count: int) -> str:
    """Return a number of bytes as text, in the largest unit up to TiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
