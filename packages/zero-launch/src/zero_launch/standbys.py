"""The agent's standbys: processes that become ranks when all ranks begin again. See [Note: standbys] in standby.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from torch.distributed.elastic.utils.api import macros

from zero_launch.standby import IMPORTS_VARIABLE, OPTION, recorded

_START_SECONDS = 5.0
_END_SECONDS = 2.0


class Standby:
    """One process that waits. Once it is a rank, torch's agent asks of it what it asks of those it starts itself."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], local_rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            words = [*command[:3], OPTION, str(number), *command[3:]]
            self.proc = subprocess.Popen(words, env=dict(env), pass_fds=[number], start_new_session=True)
        ours.settimeout(_START_SECONDS)
        self.local_rank_id = local_rank
        self._line = ours

    @property
    def runs(self) -> bool:
        """Return whether it is there still."""
        return self.proc.poll() is None

    @property
    def ready(self) -> bool:
        """Return whether it has imported torch."""
        return bool(select.select([self._line], [], [], 0)[0])

    def start(self, env: Mapping[str, str], stdout: str | None, stderr: str | None) -> bool:
        """Let it be a rank, with its output going to these files; False when it cannot be one."""
        order = {"env": dict(env), "stdout": stdout, "stderr": stderr}
        for path in filter(None, (stdout, stderr)):
            Path(path).touch()  # who shows them looks for them at once
        try:
            self._line.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            self.dismiss()
            return False
        self._line.close()
        return self.runs

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send it, and what it has started in its session, a signal."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)

    def dismiss(self) -> None:
        """End it: it is not needed."""
        self._line.close()
        self.proc.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the job's end names what SIGKILL does not end
            self.proc.wait(_END_SECONDS)


class Standbys:
    """The standbys of one host, by local rank. They start one after another, and only once the ranks run.

    ``command``: what starts a rank, with torch's macros in it. ``env``: by local rank, what a rank gets on top of this
    process's environment, as far as it is known beforehand. ``folder``: where ranks record what they change before they
    import torch.
    """

    def __init__(self, command: Sequence[str], env: Callable[[int], Mapping[str, str]], folder: Path) -> None:
        self._command, self._env, self._folder = command, env, folder
        self._waiting: dict[int, Standby] = {}

    def variables(self, local_rank: int) -> dict[str, str]:
        """What tells a rank where to record its import of torch."""
        return {IMPORTS_VARIABLE: str(self._record(local_rank))}

    def command(self, local_rank: int) -> list[str]:
        """The command that starts this rank."""
        return [str(word) for word in macros.substitute(list(self._command), str(local_rank))]

    @property
    def pids(self) -> set[int]:
        """The processes that wait."""
        return {standby.proc.pid for standby in self._waiting.values()}

    def look(self, ranks: int) -> None:
        """Begin the next one for ``ranks`` ranks, when the last one is ready."""
        self._waiting = {number: standby for number, standby in self._waiting.items() if standby.runs}
        if not all(standby.ready for standby in self._waiting.values()):
            return
        for number in range(ranks):
            env = None if number in self._waiting else self._environment(number)
            if env is not None:
                self._waiting[number] = Standby(self.command(number), env, number)
                return

    def take(self, local_rank: int, env: Mapping[str, str], stdout: str | None, stderr: str | None) -> Standby | None:
        """Start the standby for a rank; None when there is none."""
        standby = self._waiting.pop(local_rank, None)
        return standby if standby is not None and standby.start(env, stdout, stderr) else None

    def close(self) -> None:
        """End those that wait."""
        for standby in self._waiting.values():
            standby.dismiss()
        self._waiting.clear()

    def _record(self, local_rank: int) -> Path:
        return self._folder / f"imports{local_rank}.json"

    def _environment(self, local_rank: int) -> dict[str, str] | None:
        return recorded(self._record(local_rank), {**os.environ, **self._env(local_rank)})


class Prepared(Exception):
    """Carries the ranks' environments out of torch's agent before it starts fresh processes with them."""

    def __init__(self, envs: dict[int, dict[str, str]]) -> None:
        super().__init__("the ranks' environments are prepared")
        self.envs = envs


class StandbyContext(SubprocessContext):
    """Ranks that were standbys, and fresh processes where there are none."""

    def __init__(self, standbys: Standbys, **options: Any) -> None:
        super().__init__(**options)
        self._standbys = standbys

    def _start(self) -> None:
        self.subprocess_handlers = {number: self._begin(number) for number in range(self.nprocs)}

    def _begin(self, number: int) -> Any:
        env, out, err = self.envs[number], self.stdouts[number] or None, self.stderrs[number] or None
        standby = self._standbys.take(number, {**os.environ, **env}, out, err)
        if standby is not None:
            return standby
        return get_subprocess_handler(
            entrypoint=str(self.entrypoint),
            args=self.args[number],
            env=env,
            stdout=out or "",
            stderr=err or "",
            local_rank_id=number,
            numa_options=None,
        )
