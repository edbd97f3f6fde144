"""Show the files that ranks write, live, each line behind its rank's prefix."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

_POLL_SECONDS = 0.05
_PROGRESS_SECONDS = 1.0
_COLOURS = (36, 33, 32, 35, 34, 31)


class Sink(Protocol):
    """Where lines of output go: a text stream, or a channel to the launcher. Both methods may block, and raise OSError
    once nobody reads them any more."""

    def write(self, text: str, /) -> object:
        """Take ``text``, one or more whole lines."""
        ...

    def flush(self) -> object:
        """Hand on what was written."""
        ...


def prefix(rank: int, *, colour: bool) -> str:
    """Return `[rank 0] `; with ``colour``, in terminal codes for the rank's own colour."""
    text = f"[rank {rank}]"
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} "


def terminal_colours() -> tuple[bool, bool]:
    """Return whether (stdout, stderr) of this process are terminals that want colours: NO_COLOR is not set."""
    wanted = "NO_COLOR" not in os.environ
    return wanted and sys.stdout.isatty(), wanted and sys.stderr.isatty()


@dataclass
class _Tail:
    """One file that is being read. ``path``: of the file. ``prefix``: what each of its lines is shown behind. ``sink``:
    where the lines go.

    ``file``: None until it exists. ``rest``: what came after its last whole line. ``shown_at``: when a line was last
    shown (`time.monotonic`).
    """

    path: str
    prefix: str
    sink: Sink
    file: BinaryIO | None = None
    rest: bytes = b""
    shown_at: float = field(default_factory=time.monotonic)

    def pump(self, *, last: bool) -> None:
        """Write the new whole lines to the sink, behind the prefix; with ``last`` an unfinished one too.

        Of a line that is redrawn by carriage returns the newest state is written, once a second. Does nothing while the
        file does not exist. Raises OSError when the sink is closed.
        """
        if self.file is None:
            try:
                self.file = open(self.path, "rb")
            except FileNotFoundError:
                return
        *lines, self.rest = (self.rest + self.file.read()).split(b"\n")
        if last and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        elif b"\r" in self.rest and time.monotonic() - self.shown_at > _PROGRESS_SECONDS:
            # A progress bar redraws one line for ever. Its newest state is shown as a line now and then.
            *states, self.rest = self.rest.split(b"\r")
            lines.append(states[-1])
        if lines:
            self.shown_at = time.monotonic()
            # One write per batch: ranks and streams interleave between lines, never inside one.
            self.sink.write("".join(f"{self.prefix}{_last_state(line)}\n" for line in lines))
            self.sink.flush()


def _last_state(line: bytes) -> str:
    """Return what a terminal would show of ``line``, which may have been redrawn after carriage returns, as text."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode("utf-8", errors="replace")


class Streamer:
    """A thread that copies new lines of the ranks' files to a stream until `stop`, which shows the rest. For one
    use."""

    def __init__(self) -> None:
        self.broken: OSError | None = None
        """Why showing ended early, when the stream was closed by whoever read it (`zero-launch ... | head`)."""
        self._tails: list[_Tail] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero-launch-streams", daemon=True)

    def add(self, files: Mapping[int, str], sink: Sink, *, colour: bool) -> None:
        """Follow the file of each rank (rank -> path), behind the rank's prefix; the files need not exist yet.

        ``colour``: show the prefix in the rank's colour. Call it before `start`.
        """
        self._tails += [_Tail(path, prefix(rank, colour=colour), sink) for rank, path in files.items()]

    def start(self) -> None:
        """Begin to copy, on the thread; call it once."""
        self._thread.start()

    def stop(self) -> None:
        """Show what is left, an unfinished last line too, and end the thread. Call when the writers are gone."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pump(last=True)
        for tail in self._tails:
            if tail.file is not None:
                tail.file.close()
        self._tails.clear()

    def _run(self) -> None:
        """Copy until `stop` or an error, 20 times a second; the thread's function."""
        while not self._stopping.wait(_POLL_SECONDS) and self.broken is None:
            self._pump(last=False)

    def _pump(self, *, last: bool) -> None:
        """Copy what is new in every file; do nothing once the stream is ``broken``, and set that when it breaks."""
        if self.broken is not None:
            return
        try:
            for tail in self._tails:
                tail.pump(last=last)
        except OSError as error:
            self.broken = error
