"""Reports of ranks that died: the record of one failure, and the error that carries them all, first cause first."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_launch.desync import FlightRecord
from zero_launch.processes import END_FILE

_TAIL_LINES = 15
_TAIL_BYTES = 16_384
_MEANING = {
    signal.SIGABRT: "the program gave up, often a failed check in native code",
    signal.SIGBUS: "memory that could not be backed, often a full /dev/shm",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGKILL: "killed from outside, often by the kernel because memory ran out",
    signal.SIGSEGV: "invalid memory access in native code",
}


def signal_name(signum: int) -> str:
    """Return the name of a signal, `SIGTERM` for 15; `signal 34` for a real-time signal, which has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def status_name(status: int) -> str:
    """Return a text for a child's exit status: `status 1` for 1, or the name of the signal that ended it, `SIGKILL` for
    -9."""
    return f"status {status}" if status >= 0 else signal_name(-status)


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed by itself.

    ``host``, ``pid``: where it ran. ``exit_code`` is negative for a signal, and None when the rank had to be ended
    after its exception or its host was lost; ``cause`` is one line; ``detail`` the traceback or, where Python had no
    chance to write one, the end of the rank's stderr; ``seconds`` the time from the start of the ranks; ``step`` the
    optimizer step, where the rank uses zero-comm.
    """

    rank: int
    host: str
    pid: int
    exit_code: int | None
    cause: str
    detail: str
    seconds: float
    step: int | None = None

    @property
    def traceback(self) -> bool:
        """Return whether the rank died of an uncaught exception, so that ``detail`` is its traceback."""
        return self.detail.startswith("Traceback ")

    @property
    def shell_code(self) -> int:
        """The exit status as a shell shows it: 128 plus the number of the signal that ended the rank; 1 if there is
        none."""
        if self.exit_code is None or self.exit_code == 0:
            return 1
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code


class LaunchError(RuntimeError):
    """A job that failed. ``failures`` holds the ranks that failed by themselves, the first cause first.

    ``nproc`` is the number of ranks of the job; ``notes`` are lines that follow in the text; ``divergence`` says where
    the ranks stopped asking for the same collectives, when they did; ``flight`` is what the flight recorders of the
    ranks held, by rank, where they use zero-comm; ``asked``: the job had been asked to save and end (`--requeue`), and
    did not get to it.
    """

    def __init__(
        self,
        failures: Sequence[RankFailure],
        nproc: int,
        notes: Sequence[str] = (),
        *,
        divergence: str | None = None,
        flight: Mapping[int, FlightRecord] | None = None,
        asked: bool = False,
    ) -> None:
        self.asked = asked
        self.failures = tuple(failures)
        self.flight = dict(flight or {})
        self.nproc = nproc
        self.notes = tuple(notes)
        self.divergence = divergence
        super().__init__(self._text())

    @property
    def exit_code(self) -> int:
        """The launcher's exit status: `RankFailure.shell_code` of the first rank that failed, 128 plus the number for a
        signal; 1 without failures."""
        return self.failures[0].shell_code if self.failures else 1

    def _text(self) -> str:
        """Return the text of the error: the divergence, the first failure in full, a line for each other one, and the
        notes; without failures the divergence, or that the job failed, and the notes."""
        lines = [] if self.divergence is None else [self.divergence]
        if not self.failures:
            return "\n".join([*(lines or ["the job failed"]), *self.notes])
        first, *others = self.failures
        lines.append(f"rank {first.rank} of {self.nproc} failed first: {first.cause}")
        pid = f", pid {first.pid}" if first.pid else ""
        lines.append(f"  on {first.host}{pid}, {first.seconds:.1f} s after start")
        lines += [f"  | {line}" for line in first.detail.splitlines()]
        for other in others:
            later = other.seconds - first.seconds
            where = f" (on {other.host})" if other.host != first.host else ""
            lines.append(f"rank {other.rank} failed {later:.1f} s later{where}: {other.cause}")
        return "\n".join([*lines, *self.notes])


def read_error_file(path: Path) -> dict[str, Any] | None:
    """Return what the rank wrote about an uncaught exception to its error file ``path``, a dict with `message` and
    `extraInfo` as `rank.write_error_file` has them; None if there is no such file.

    None also for a file that torch wrote itself, which lacks our time `uncaught_at`: that exception may have been
    caught.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["message"]
    except FileNotFoundError:
        return None
    # The engine's own decorator writes this format without our time stamp, for exceptions that may have been caught.
    return record if isinstance(record, dict) and "uncaught_at" in record.get("extraInfo", {}) else None


@dataclass(frozen=True)
class ScriptEnd:
    """A script that ended without an uncaught exception: the exit ``status`` that it asked for, and when (``at``,
    epoch)."""

    status: int
    at: float


def read_end_file(folder: Path) -> ScriptEnd | None:
    """Return how a rank's script ended, from the file that the rank wrote into its ``folder``; None if there is none,
    as while the script runs or after an uncaught exception."""
    try:
        return ScriptEnd(**json.loads((folder / END_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def describe_exit(exit_code: int) -> str:
    """Return one line about a rank that ended with ``exit_code`` (negative for a signal) without a Python exception:
    the status, or the signal and what it often means.
    """
    if exit_code >= 0:
        return f"exit status {exit_code}, without an uncaught exception"
    name = signal_name(-exit_code)
    meaning = _MEANING.get(signal.Signals(-exit_code)) if name.startswith("SIG") else None
    return f"died of {name} ({meaning})" if meaning else f"died of {name}"


def tail(path: Path) -> str:
    """Return the last 15 lines of a log file, of its last 16 KiB; empty if it is empty or missing."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
