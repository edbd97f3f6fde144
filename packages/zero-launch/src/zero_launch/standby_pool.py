"""The agent's standbys: processes that fork the ranks of a restart. See [Note: standbys] in standby.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.utils.api import macros

from zero_launch.processes import ended_status
from zero_launch.standby import IMPORTS_VARIABLE, OPTION, recorded

_READY_SECONDS = 15.0
"""How long ranks wait for a standby that still imports, as fresh processes would do too."""
_START_SECONDS = 5.0
_TELL_SECONDS = 1.0
_END_SECONDS = 2.0
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class StandbyKind:
    """What ranks that are forked from one standby have in common.

    ``command``: the words that start such a rank afresh. ``env``: (name, value) of the variables that are added to this
    process's. ``imports``: the recorded imports as JSON of `standby.Imports`.
    """

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    imports: str


class ForkedRank:
    """A rank that a standby has forked, with the interface that torch's agent expects of a subprocess.

    ``pid``: of the rank, which leads its own process group. ``local_rank``: its number on this host.
    """

    def __init__(self, standby: Standby, pid: int, local_rank: int) -> None:
        self.pid, self.local_rank_id = pid, local_rank
        self.proc = self
        self.returncode: int | None = None
        self._standby = standby

    def poll(self) -> int | None:
        """Return the rank's exit status (a signal is negative); None while it runs. The end of its standby kills the
        rank: -9."""
        if self.returncode is None:
            ended = ended_status(self.pid)
            # Its standby tells of its end a moment after others can see it, and not at all while it is stopped.
            told = self._standby.status_of(self.pid, 0.0 if ended is None else _TELL_SECONDS)
            self.returncode = ended if told is None else told
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the rank has ended, and return its exit status (a signal is negative). ``timeout``: in seconds;
        None for no limit. Raises `subprocess.TimeoutExpired` if the rank still runs then."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            self._standby.status_of(self.pid, _PAUSE_SECONDS)
        return status

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal (default SIGTERM) to all processes of the rank's process group; do nothing if all have
        ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)


class Standby:
    """One standby process, which the constructor starts: it imports what its ranks import, then forks a rank when it is
    told to, in each attempt.

    ``kind``: of its ranks. The process runs `standby.stand_by` and answers over a socket. The standby is over once that
    socket is closed or cannot be used, as the process has ended or was dismissed.
    """

    def __init__(self, kind: StandbyKind) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            words = [*kind.command[:3], OPTION, str(number), *kind.command[3:]]
            env = {**os.environ, **dict(kind.env)}
            self.proc = subprocess.Popen(words, env=env, pass_fds=[number], start_new_session=True)
        ours.settimeout(_START_SECONDS)
        self.kind = kind
        self.why_not: str | None = None
        """Why it cannot fork ranks; None if it can, or while it still imports."""
        self._line, self._rest = ours, b""
        self._is_ready, self._is_over = False, False
        self._forked: list[int] = []
        self._statuses: dict[int, int] = {}
        self._send(json.loads(kind.imports))

    @property
    def runs(self) -> bool:
        """Return whether the process runs and has not been dismissed."""
        return self.proc.poll() is None and not self._is_over

    @property
    def ready(self) -> bool:
        """Return whether the process has finished importing, also if it then found that it cannot fork ranks
        (``why_not``)."""
        self._take_answers(0.0)
        return self._is_ready

    @property
    def is_used(self) -> bool:
        """Return whether a rank that this standby has forked still runs."""
        self._take_answers(0.0)
        return self.runs and any(pid not in self._statuses for pid in self._forked)

    def start(
        self, local_rank: int, env: Mapping[str, str], stdout: str | None, stderr: str | None, wait: float
    ) -> ForkedRank | None:
        """Have the standby fork a rank, and return the rank; None if the standby cannot, or is not ready within
        ``wait`` seconds.

        ``local_rank``: the rank's number on this host. ``env``: the rank's whole environment. ``stdout``, ``stderr``:
        files for its output, which are made at once; None for this process's. If the fork takes more than 5 s the
        standby is dismissed.
        """
        self._read_until(lambda: self._is_ready, wait)
        if not self._is_ready or self.why_not is not None:
            return None
        for path in filter(None, (stdout, stderr)):
            Path(path).touch()  # who shows them looks for them at once
        before = len(self._forked)
        self._send({"env": dict(env), "stdout": stdout, "stderr": stderr})
        self._read_until(lambda: len(self._forked) > before, _START_SECONDS)
        if len(self._forked) > before:
            return ForkedRank(self, self._forked[-1], local_rank)
        self.dismiss()  # stopped, it would fork the rank when it continues, beside the one that takes its place
        return None

    def status_of(self, pid: int, timeout: float | None) -> int | None:
        """Wait up to ``timeout`` seconds (None: without limit) for the rank with this ``pid`` to end, and return its
        exit status; None if it still runs then. A rank of a standby that is over counts as killed: -9."""
        self._read_until(lambda: pid in self._statuses, timeout)
        return -signal.SIGKILL if self._is_over and pid not in self._statuses else self._statuses.get(pid)

    def dismiss(self) -> None:
        """Kill the process, and with it the ranks that it has forked; wait up to 2 s for its end."""
        self._is_over = True
        self._line.close()
        self.proc.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the job's end names what SIGKILL does not end
            self.proc.wait(_END_SECONDS)

    def _send(self, content: object) -> None:
        """Send ``content`` as a line of JSON; if that fails the standby is over."""
        try:
            self._line.sendall(json.dumps(content).encode() + b"\n")
        except OSError:
            self._is_over = True

    def _read_until(self, condition: Callable[[], bool], seconds: float | None) -> None:
        """Take answers until ``condition`` is true, ``seconds`` are over (None: no limit) or the standby is over."""
        end = None if seconds is None else time.monotonic() + seconds
        self._take_answers(0.0)
        while not condition() and not self._is_over:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return
            self._take_answers(left)

    def _take_answers(self, seconds: float | None) -> None:
        """Take the answers that have arrived, waiting up to ``seconds`` (None: without limit) for the first; do nothing
        if none comes. The standby is over when it has closed the socket."""
        while not self._is_over and select.select([self._line], [], [], seconds)[0]:
            seconds = 0.0
            try:
                came = self._line.recv(1 << 16)
            except OSError:
                came = b""
            if not came:
                self._is_over = True
                return
            *lines, self._rest = (self._rest + came).split(b"\n")
            for answer in map(json.loads, lines):
                self._record_answer(answer)

    def _record_answer(self, answer: Mapping[str, Any]) -> None:
        """Record one answer: that it is ready, with `why_not`; the `pid` of a forked rank; or a rank's `pid` and
        `status`."""
        if "why_not" in answer:
            self._is_ready, self.why_not = True, answer["why_not"]
        elif "status" in answer:
            self._statuses[answer["pid"]] = answer["status"]
        else:
            self._forked.append(answer["pid"])


class StandbyPool:
    """The standbys of one host, one for each kind of rank; `adjust_to` and `prepare` start them one after another.

    ``command``: the words that start a rank, with torch's macros (`${local_rank}`). ``env``: returns, for a local rank,
    the variables that it gets on top of this process's environment, as far as they are known beforehand. ``folder``:
    where ranks record what they import. ``say``: called with the reason when standbys are given up.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Callable[[int], Mapping[str, str]],
        folder: Path,
        say: Callable[[str], object],
    ) -> None:
        self._command, self._env, self._folder, self._say = command, env, folder, say
        self._standbys: list[Standby] = []
        self._ranks: dict[int, ForkedRank] = {}
        self._given_up = False
        self.imports: dict[int, str] = {}
        """The recorded imports (JSON) of the ranks, by local rank, as of the last `adjust_to`."""

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variable (name -> value) that tells a rank where to record its imports."""
        return {IMPORTS_VARIABLE: str(self._imports_file(local_rank))}

    def command(self, local_rank: int) -> list[str]:
        """Return the words of the command that starts this rank, with torch's macros replaced."""
        return [str(word) for word in macros.substitute(list(self._command), str(local_rank))]

    @property
    def pids(self) -> set[int]:
        """The pids of the standbys."""
        return {standby.proc.pid for standby in self._standbys}

    def rank(self, pid: int) -> ForkedRank | None:
        """Return the rank with this ``pid`` if a standby has forked it and no later one has its local rank; else
        None."""
        return next((rank for rank in self._ranks.values() if rank.pid == pid), None)

    def adjust_to(self, ranks: int) -> None:
        """Dismiss standbys that are no longer needed for local ranks 0 to ``ranks`` - 1, and start one that is missing,
        if all others are ready. Give up standbys for good if one cannot fork."""
        if self._given_up:
            self._dismiss_unused()
            return
        kinds = {number: kind for number in range(ranks) if (kind := self._kind(number)) is not None}
        self.imports, wanted = {number: kind.imports for number, kind in kinds.items()}, list(kinds.values())
        for standby in list(self._standbys):
            why = standby.why_not if standby.ready else None if standby.runs else "importing ahead ended the process"
            if why is not None:
                self._give_up(why)
                return
            if not standby.is_used and (not standby.runs or standby.kind not in wanted):
                self._standbys.remove(standby)
                standby.dismiss()
        if not all(standby.ready for standby in self._standbys):
            return
        there = [standby.kind for standby in self._standbys]
        missing = next((kind for kind in wanted if kind not in there), None)
        if missing is not None:
            self._standbys.append(Standby(missing))

    def prepare(self, imports: Mapping[int, str], seconds: float) -> None:
        """Start the standbys for ranks with these recorded imports, and wait until they are ready, at most ``seconds``.

        ``imports``: by local rank, as in the attribute ``imports``; not empty. Returns early when standbys are given
        up.
        """
        for number, text in imports.items():
            self._imports_file(number).write_text(text, encoding="utf-8")
        end = time.monotonic() + seconds
        while not self._given_up and time.monotonic() < end:
            self.adjust_to(1 + max(imports))
            if {standby.kind for standby in self._standbys if standby.ready} >= {self._kind(n) for n in imports}:
                return
            time.sleep(_PAUSE_SECONDS)

    def take(
        self, local_rank: int, env: Mapping[str, str], stdout: str | None, stderr: str | None, wait: float
    ) -> ForkedRank | None:
        """Start a rank from a standby, and return the rank; None if no standby can start it within ``wait`` seconds, or
        standbys were given up.

        ``local_rank``: the rank's number on this host. ``env``: its whole environment. ``stdout``, ``stderr``: files
        for its output; None for this process's.
        """
        kind = None if self._given_up else self._kind(local_rank)
        standby = next((standby for standby in self._standbys if standby.kind == kind), None)
        rank = None if standby is None else standby.start(local_rank, env, stdout, stderr, wait)
        self._ranks.pop(local_rank, None)
        if rank is not None:
            self._ranks[local_rank] = rank
        return rank

    def close(self) -> None:
        """Kill all standbys, and with them the ranks that they have forked."""
        for standby in self._standbys:
            standby.dismiss()
        self._standbys.clear()

    def _give_up(self, why: str) -> None:
        """Start no standbys from here on, and no ranks from those that are left; say ``why``. A standby whose ranks run
        is killed once they have ended, as they would die with it; the others now."""
        self._given_up = True
        self._dismiss_unused()
        self._say(f"no standbys, every restart imports again: {why}")

    def _dismiss_unused(self) -> None:
        """Kill the standbys of which no rank runs."""
        for standby in [standby for standby in self._standbys if not standby.is_used]:
            self._standbys.remove(standby)
            standby.dismiss()

    def _imports_file(self, local_rank: int) -> Path:
        """Return the path of the file in which a rank records its imports."""
        return self._folder / f"imports{local_rank}.json"

    def _kind(self, local_rank: int) -> StandbyKind | None:
        """Return the kind of standby that can fork the rank ``local_rank``. None if the rank has recorded no imports,
        as it has not imported anything yet, or none of its modules can be imported ahead.
        """
        imports = recorded(self._imports_file(local_rank))
        env = {name: value for name, value in self._env(local_rank).items() if name != IMPORTS_VARIABLE}
        kind = StandbyKind(tuple(self.command(local_rank)), tuple(sorted(env.items())), imports)
        return kind if imports else None


class Prepared(Exception):
    """Carries the ranks' environments out of torch's agent before it starts fresh processes with them. ``envs``: by
    local rank, the environment variables of the process to start.
    """

    def __init__(self, envs: dict[int, dict[str, str]]) -> None:
        super().__init__("the ranks' environments are prepared")
        self.envs = envs


class StandbyContext(SubprocessContext):
    """A `SubprocessContext` of torch's that takes ranks from ``pool``, and starts fresh processes where there are
    none.

    ``options``: the arguments of `SubprocessContext`.
    """

    def __init__(self, pool: StandbyPool, **options: Any) -> None:
        super().__init__(**options)
        self._pool = pool

    def _start(self) -> None:
        """Start every rank of this host; a standby that still imports is waited for, up to 15 s in all."""
        end = time.monotonic() + _READY_SECONDS
        self.subprocess_handlers = {number: self._start_local_rank(number, end) for number in range(self.nprocs)}

    def _start_local_rank(self, number: int, end: float) -> Any:
        """Start local rank ``number`` and return its handle, a `ForkedRank` or torch's `SubprocessHandler`. ``end``:
        until when (`time.monotonic`) to wait for a standby."""
        env, out, err = self.envs[number], self.stdouts[number] or None, self.stderrs[number] or None
        forked = self._pool.take(number, {**os.environ, **env}, out, err, max(0.0, end - time.monotonic()))
        if forked is not None:
            return forked
        return get_subprocess_handler(
            entrypoint=str(self.entrypoint),
            args=self.args[number],
            env=env,
            stdout=out or "",
            stderr=err or "",
            local_rank_id=number,
        )
