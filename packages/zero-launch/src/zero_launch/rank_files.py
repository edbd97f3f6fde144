"""The files of a job's ranks, and what is known of each rank's process."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from zero_launch.orders import Orders
from zero_launch.processes import REQUEUE_VARIABLE, exit_status
from zero_launch.report import ScriptEnd
from zero_launch.standby_pool import Prepared, StandbyPool


class RankFiles(LogsSpecs):
    """The files of the ranks, `<folder>/rank0/stdout.log`, `stderr.log` and `error.json`, and the environment variables
    that the ranks get from us: the `LogsSpecs` of torch's agent.

    ``direct_rank``: the rank that writes to the terminal, without log files; None for no rank. ``env``: variables of
    every rank; ``own_env``: further ones of each rank, by local rank; empty for none. ``recorders``: the folder for the
    ranks' flight recorders (see desync.py). ``takes_orders``: the launcher may ask the ranks to leave (see orders.py).
    """

    def __init__(
        self,
        folder: Path,
        direct_rank: int | None,
        env: Mapping[str, str],
        *,
        own_env: Sequence[Mapping[str, str]] = (),
        recorders: Path,
        takes_orders: bool = False,
    ) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._direct_rank = direct_rank
        self._env = dict(env)
        self._own_env = own_env
        self._recorders = recorders
        self._takes_orders = takes_orders
        self.standby_pool: StandbyPool | None = None
        """Where ranks come from that have imported torch already; None for jobs without."""
        self._only_prepares = False
        self.ranks: dict[int, Path] = {}
        """Local rank to the folder of its files, for the attempt that runs."""
        self.recorders: dict[int, Path] = {}
        """Rank to its flight recorder, for the attempt that runs."""
        self.orders = Orders(recorders / "orders")
        """The order that the ranks of the running attempt have."""

    @property
    def takes_requests(self) -> bool:
        """Return whether the job has `--requeue`: its ranks then ignore the signals that ask it to end."""
        return REQUEUE_VARIABLE in self._env

    @property
    def root_log_dir(self) -> str:
        """The folder of all attempts' files, for torch's agent."""
        return str(self._folder)

    def own_variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that a rank gets from us and that are the same in every attempt: ``env``,
        overridden by the rank's ``own_env``, and where to record imports if there are standbys."""
        own = self._own_env[local_rank] if self._own_env else {}
        imports = {} if self.standby_pool is None else self.standby_pool.variables(local_rank)
        return {**self._env, **own, **imports}

    @contextlib.contextmanager
    def only_preparing(self) -> Iterator[None]:
        """Context manager: inside it `reify` raises `Prepared` with the ranks' environments instead of making files, so
        that torch's agent prepares the ranks and does not start them."""
        self._only_prepares = True
        try:
            yield
        finally:
            self._only_prepares = False

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of an attempt, add our variables to ``envs`` (by local rank), and return the files' paths.

        torch's agent calls this before it starts the ranks. Sets ``ranks``, ``recorders`` and ``orders``. Folders of
        restarts are named `rank0.restart1`. Raises FileExistsError if a folder is there already, and `Prepared` inside
        `only_preparing`.
        """
        if self._only_prepares:
            raise Prepared(envs)
        stdouts, stderrs, errors = {}, {}, {}
        self.recorders = {}
        attempt = max(int(env["TORCHELASTIC_RESTART_COUNT"]) for env in envs.values())
        self.orders = Orders(self._recorders / f"orders{attempt}")
        told = self.orders.open() if self._takes_orders else {}
        for local_rank, env in envs.items():
            folder = self._folder / (f"rank{env['RANK']}" + (f".restart{attempt}" if attempt else ""))
            folder.mkdir(parents=True)
            self.ranks[local_rank] = folder
            direct = int(env["RANK"]) == self._direct_rank
            stdouts[local_rank] = "" if direct else str(folder / "stdout.log")
            stderrs[local_rank] = "" if direct else str(folder / "stderr.log")
            errors[local_rank] = str(folder / "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
            recorder = self._recorders / folder.name
            self.recorders[int(env["RANK"])] = recorder
            env.update({"ZERO_COMM_RING": str(recorder), **told, **self.own_variables(local_rank)})
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=errors)


@dataclass
class RankStatus:
    """The last known state of one rank's process, which is not reaped here.

    ``folder``: of its files. ``seen_alive``: when it was last known to run (epoch). ``status``: its exit status,
    negative for a signal; None while it runs. ``status_before_stop``: that status when the launcher began to end the
    attempt. ``status_of``: returns the exit status of a pid, None while it runs.
    """

    rank: int
    pid: int
    folder: Path
    seen_alive: float
    status: int | None = None
    status_before_stop: int | None = None
    end: ScriptEnd | None = None
    """How its script ended before the launcher ended the attempt, if it did: the process may take longer."""
    status_of: Callable[[int], int | None] = exit_status
    left_for: str | None = None
    """The order (see orders.py) on which it left; None if it did not."""

    @property
    def failed_with(self) -> int | None:
        """The status with which the process, or else its script, failed by itself; 0 or None if neither did."""
        return self.status_before_stop or (None if self.end is None else self.end.status)

    @property
    def ended_well(self) -> bool:
        """Return whether the rank's process ended with status 0 before the launcher began to end the attempt, or its
        script did so while the process was not over."""
        return self.status_before_stop == 0 or (
            self.status_before_stop is None and self.end is not None and not self.end.status
        )

    @property
    def over_at(self) -> float:
        """When its script ended (epoch), as the rank recorded it; else when the process was last known to run."""
        return self.seen_alive if self.end is None else self.end.at

    def refresh(self) -> None:
        """Look at the process now, and update ``status`` and ``seen_alive``; do nothing once the status is known. A
        process that was reaped elsewhere counts as killed by SIGKILL."""
        if self.status is None:
            now = time.time()
            try:
                self.status = self.status_of(self.pid)
            except ChildProcessError:  # it outlived SIGKILL for a while, and the engine was there when it ended
                self.status = -signal.SIGKILL
            if self.status is None:
                self.seen_alive = now
