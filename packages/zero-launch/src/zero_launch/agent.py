"""torchrun's elastic agent with our rules: where output goes, when a job ends, and who failed first.

The rendezvous, the ranks' environment and their start are the agent's. This file and rank_files.py use the places that
it offers for extension: the start / monitor / shutdown steps of an agent, and a `LogsSpecs`.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from zero_launch.compat import shutdown_timeout
from zero_launch.desync import FlightRecord, Watcher, abandoned, explain
from zero_launch.orders import END
from zero_launch.presence import HostPresence, Presence
from zero_launch.processes import await_exiting, end_job, exit_status, kill_those_ignoring, wait_for_helpers
from zero_launch.rank_ends import describe_outcome, failure_of
from zero_launch.rank_files import RankFiles, RankStatus
from zero_launch.repeated_failures import RepeatedFailures
from zero_launch.report import LaunchError, RankFailure, read_end_file, read_error_file
from zero_launch.spec import SILENCE_SECONDS
from zero_launch.standby_pool import Prepared, StandbyContext
from zero_launch.streams import Sink, Streamer, terminal_colours

_STANDBY_SECONDS = 10.0
"""When standbys begin where it cannot be seen that ranks train."""


class Agent(LocalElasticAgent):
    """torch's elastic agent for the ranks of one host, with our rules about output, failures and ends. An attempt is
    one start of all ranks; a standby is a process that has imported what ranks import, and forks them at a restart.

    ``spec``: torch's description of the ranks. ``files``: the folders of their files. ``job_id``: of the job on this
    host. ``grace_seconds``: how long ranks may take to end once the job is to stop. ``sinks``: where the ranks' stdout
    and stderr go, ``colours``: whether with colours (default: the terminal). ``host``: its name in reports.
    ``stopped_seconds``: how long a rank may be stopped (SIGSTOP) before that is reported. ``quiet``: no remarks.
    ``started``: called with rank -> pid when an attempt's ranks are started. ``ranks_now``: returns the number of ranks
    of the next attempt. ``own_signals``: signals whose handlers stay as they are when ranks start.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        files: RankFiles,
        job_id: str,
        grace_seconds: float,
        *,
        sinks: tuple[Sink, Sink] | None = None,
        colours: tuple[bool, bool] | None = None,
        host: str | None = None,
        stopped_seconds: float = SILENCE_SECONDS,
        quiet: bool = False,
        started: Callable[[Mapping[int, int]], None] = lambda pids: None,
        ranks_now: Callable[[], int] | None = None,
        own_signals: Sequence[signal.Signals] = (),
    ) -> None:
        super().__init__(spec, logs_specs=files)
        self._files = files
        self._job_id = job_id
        self._grace_seconds = grace_seconds
        self._sinks: tuple[Sink, Sink] = (sys.stdout, sys.stderr) if sinks is None else sinks
        self._colours = terminal_colours() if colours is None else colours
        self._host = socket.gethostname() if host is None else host
        self._started = started
        self._ranks_now = ranks_now
        self._own_signals = own_signals
        self._stopped_seconds = stopped_seconds
        self._quiet = quiet
        self._ignored = [s for s in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(s) is signal.SIG_IGN]
        self._streamer = Streamer()
        self._records: list[RankStatus] = []
        self._started_at = time.time()
        self._stopping = False
        self._watcher = Watcher({})
        self._repeated_failures = RepeatedFailures()
        self._world_size = 0
        self._here = HostPresence({}, 0, stopped_seconds)
        self._presence = Presence(0, "")
        self.asked_to_end = False
        """True once the ranks are to save and leave."""
        self._why_asked = ""
        self._has_asked = False
        self.left_for: str | None = None
        """The order (see orders.py) on which all ranks have left, if that is how the job ended."""
        self.divergence: str | None = None
        """Why the ranks of this host cannot continue together, when that is why the job was ended."""
        self.notes: list[str] = []
        """The processes that ranks left behind and that did not end when they were asked to."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Wait for the next attempt, in which the ranks get their numbers. Before that, set the number of ranks of this
        host by ``ranks_now``, as it may have changed.
        """
        if self._ranks_now is not None:
            worker_group.spec.local_world_size = self._ranks_now()
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of an attempt, begin to show their output and to watch them, and return local rank -> pid, as
        torch's agent expects. If the ranks are to save and leave already, they get that order at once."""
        self._streamer = Streamer()
        self._started_at = time.time()
        self._stopping = False
        self.divergence = None
        handlers = {sig: signal.getsignal(sig) for sig in self._own_signals}
        ids = self._start_ranks(worker_group)
        for sig, handler in handlers.items():  # as below
            signal.signal(sig, handler)
        if self.asked_to_end:
            self._files.orders.give(END)
        for sig in self._ignored:  # `nohup` and `&` ignore these; the engine's start put a handler in their place
            signal.signal(sig, signal.SIG_IGN)
        folders = {worker.global_rank: self._files.ranks[worker.local_rank] for worker in worker_group.workers}
        self._records = [
            RankStatus(
                *(worker.global_rank, ids[worker.local_rank], folders[worker.global_rank], time.time()),
                status_of=self._status_of,
            )
            for worker in worker_group.workers
        ]
        self._world_size = worker_group.workers[0].world_size
        self._started({record.rank: record.pid for record in self._records})
        self._watcher = Watcher(self._files.recorders)
        pids = {record.rank: record.pid for record in self._records}
        self._here = HostPresence(pids, int(worker_group.master_port or 0), self._stopped_seconds)
        self._presence = Presence(self._world_size, f"{worker_group.master_addr}:{worker_group.master_port}")
        for name, sink, colour in zip(("stdout.log", "stderr.log"), self._sinks, self._colours, strict=True):
            paths = {r: str(folder / name) for r, folder in folders.items() if (folder / name).exists()}
            self._streamer.add(paths, sink, colour=colour)
        self._streamer.start()
        return ids

    def _start_ranks(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the processes of the ranks, from standbys where there are any; return local rank -> pid."""
        standby_pool = self._files.standby_pool
        if standby_pool is None or not standby_pool.pids:
            fresh: dict[int, Any] = super()._start_workers(worker_group)
            return fresh
        try:
            with self._files.only_preparing():
                super()._start_workers(worker_group)
            raise RuntimeError("torch's agent started ranks without asking where their output goes")
        except Prepared as prepared:
            envs = prepared.envs
        spec = worker_group.spec
        args = {number: tuple(standby_pool.command(number)[1:]) for number in envs}
        context = StandbyContext(
            standby_pool,
            name=spec.role,
            entrypoint=spec.entrypoint,
            args=args,
            envs=envs,
            logs_specs=self._files,
        )
        context.start()
        self._pcontext = context
        return context.pids()

    def _status_of(self, pid: int) -> int | None:
        """Return the exit status of the rank with this ``pid`` (minus the number of a signal); None while it runs.
        Raises ChildProcessError if its status was taken already."""
        standby_pool = self._files.standby_pool
        forked = None if standby_pool is None else standby_pool.rank(pid)
        return exit_status(pid) if forked is None else forked.poll()

    @property
    def _spared(self) -> set[int]:
        """The pids of the standbys, which are not ended with an attempt; empty without standbys."""
        return set() if self._files.standby_pool is None else self._files.standby_pool.pids

    def dismiss_standbys(self) -> None:
        """Kill the standbys, if the job has any."""
        if self._files.standby_pool is not None:
            self._files.standby_pool.close()

    def _prepare_restart(self) -> None:
        """Start a standby if the job has standbys, one is missing, and restarts remain; not before every rank trains or
        10 s have passed since the start."""
        standby_pool = self._files.standby_pool
        if standby_pool is None or self._remaining_restarts <= 0:
            return
        trains = all(self._watcher.step_of(record.rank) for record in self._records)
        if trains or time.time() - self._started_at > _STANDBY_SECONDS:
            standby_pool.adjust_to(len(self._records))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the attempt; end it first if a rank failed, is stuck, or cannot finish.

        torch's agent calls it again and again, and restarts the ranks or ends the job as the state says. Raises OSError
        when the output can no longer be shown.
        """
        self._pass_request_on()
        if self._streamer.broken is not None:
            raise self._streamer.broken
        for record in self._records:
            record.refresh()
        for record in self._records:
            if record.status:
                record.left_for = self._files.orders.answer(record.rank)
        left = {record.rank: record.left_for for record in self._records if record.status}
        if not all(left.values()) or self._stuck_after_exception():
            self._note_ends()
            records = self._watcher.records
            why = self._explain_hang(records, stalled=False) or abandoned(records, self._left_first(), is_over=True)
            self._set_divergence(why)
            self._handle_failure()
        elif any(record.status is None for record in self._records):
            ended = [record.rank for record in self._records if record.status == 0]
            if self._watcher.read_if_due():
                self._report_delays(ended)
                self._prepare_restart()
                records, stalled = self._watcher.records, self._watcher.stalled
                why = abandoned(records, ended, is_over=False) or self._explain_hang(records, stalled=stalled)
                self._set_divergence(why)
                if self.divergence is not None:
                    self._announce_divergence(self.divergence)
                    self._handle_failure()
            if self.divergence is None:
                # Not asking the engine before all is over keeps it from ending a job by itself: it would wait 30 s for
                # the other ranks whatever its settings say, and it reaps, which would take the statuses from us.
                return RunResult(state=WorkerState.HEALTHY)
        elif left:
            return self._have_left(next(filter(None, left.values())))
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def ask_to_end(self, why: str = "") -> None:
        """Request that the ranks save and leave after their current step, in later attempts too; ``why`` is printed.

        Safe in a signal handler and on any thread: it only records the request, which the monitor loop carries out,
        because a handler may interrupt a write or an import that it would then run again and break.
        """
        self._why_asked = why
        self.asked_to_end = True

    def _pass_request_on(self) -> None:
        """Carry out a request of `ask_to_end`: print why and order the ranks to leave; does nothing after the first
        time."""
        if self.asked_to_end and not self._has_asked:
            self._has_asked = True
            self._say_all([self._why_asked] if self._why_asked else [])
            self._files.orders.give(END)

    def _have_left(self, order: str) -> RunResult:
        """Return the result, a success, of an attempt in which every rank has ended, some because they were told to
        (``order``, see orders.py); set ``left_for`` to the order."""
        self.left_for = order
        return RunResult(state=WorkerState.SUCCEEDED, return_values={record.rank: None for record in self._records})

    def _report_delays(self, ended: Sequence[int]) -> None:
        """Print remarks about ranks that hold the job up, as they are stopped, have not connected to the store, or have
        ended. ``ended``: the ranks with status 0."""
        self._here.find_arrivals(ended, self._watcher.records)
        self._say_all(self._here.stopped())
        self._presence.update(self._here.arrived, ended)
        self._say_all(self._presence.remarks())

    def _say_all(self, texts: Sequence[str]) -> None:
        """Print ``texts`` unless the job is quiet."""
        for text in () if self._quiet else texts:
            print(f"zero-launch: {text}", file=sys.stderr, flush=True)

    def _set_divergence(self, why: str | None) -> None:
        """Set ``divergence`` to why the ranks cannot continue together (None: they can); if they cannot, no restart
        follows."""
        self.divergence = why
        if why is not None:
            self._remaining_restarts = 0  # the same would happen again

    def _announce_divergence(self, why: str) -> None:
        """Print at once why ranks that still run are ended; the final error repeats it."""
        print(f"zero-launch: {why}", file=sys.stderr, flush=True)

    def _explain_hang(self, records: Mapping[int, FlightRecord], *, stalled: bool) -> str | None:
        """Return a text about why the ranks cannot finish, by the flight ``records`` (by rank) of this host's ranks;
        None while they may. ``stalled``: the ranks of this host all wait, and none has moved."""
        return explain(records, stalled=stalled and len(records) == self._world_size)

    def _handle_failure(self) -> None:
        """End the ranks that still run in a failed attempt. If restarts remain, print the failure; but if attempts keep
        failing alike, use no more restarts, and add why to ``notes``."""
        self._end_ranks(signal.SIGTERM)
        if self._remaining_restarts <= 0:
            return
        hopeless = self._repeated_failures.count_attempt(self.failures(), self._remaining_restarts)
        if hopeless is None:
            self._report_restart()
            return
        self.notes.append(hopeless)
        self._remaining_restarts = 0

    def _report_restart(self) -> None:
        """Print the failure that leads to a restart, and the number of the restart."""
        number, total = self._restarts_so_far() + 1, self._worker_group.spec.max_restarts
        print(f"zero-launch: {self.error([])}\nzero-launch: restart {number} of {total}", file=sys.stderr, flush=True)

    def _restarts_so_far(self) -> int:
        """Return the number of restarts that have taken place."""
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the ranks and everything that they started, by ``death_sig`` first, and stop following their output.

        If all ranks succeeded, their helpers get the grace period to end by themselves. ``timeout`` is part of torch's
        interface and has no effect.
        """
        for record in self._records:
            record.refresh()
        if self._records and all(record.status == 0 for record in self._records):
            pids = [record.pid for record in self._records]
            wait_for_helpers(self._job_id, pids, grace_seconds=self._grace_seconds, spared=self._spared)
        self._end_ranks(death_sig)
        super()._shutdown(death_sig, **shutdown_timeout(1))
        self._streamer.stop()

    def _stuck_after_exception(self) -> bool:
        """Return whether a rank still runs more than ``grace_seconds`` after it recorded an uncaught exception."""
        limit = time.time() - self._grace_seconds
        for record in self._records:
            if record.status is None:
                error = read_error_file(record.folder / "error.json")
                if error is not None and error["extraInfo"]["uncaught_at"] < limit:
                    return True
        return False

    def _end_ranks(self, signum: signal.Signals) -> None:
        """End the ranks by ``signum``, then by SIGKILL after the grace period, with everything that they started; add
        what else had to be killed to ``notes``. Blocks until they are gone.
        """
        self._note_ends()
        pids = {record.pid for record in self._records}
        if self._files.takes_requests:
            kill_those_ignoring(pids, signum)
        ended = end_job(self._job_id, pids, signum=signum, grace_seconds=self._grace_seconds, spared=self._spared)
        self.notes += [f"left behind: {text}" for pid, text in ended if pid not in pids]
        for record in self._records:
            record.refresh()

    def _note_ends(self) -> None:
        """At the first failure, before we end the others, record how every rank stands: its status, the end of its
        script, the order on which it left. Later calls do nothing."""
        if self._stopping:
            return
        self._stopping = True
        self._watcher.read()
        await_exiting([record.pid for record in self._records if record.status is None])
        for record in self._records:
            record.refresh()
            record.status_before_stop, record.end = record.status, read_end_file(record.folder)
            if record.end is not None and record.left_for is None:
                record.left_for = self._files.orders.answer(record.rank)

    def _left_first(self) -> list[int]:
        """Return the ranks that ended with status 0, or whose script came to its end, before any rank failed."""
        failed = min((self._started_at + failure.seconds for failure in self.failures()), default=time.time())
        well = [record for record in self._records if record.ended_well]
        return [record.rank for record in well if record.end is None or record.end.at < failed]

    def failures(self) -> list[RankFailure]:
        """Return the ranks of this host that failed by themselves in the last attempt, in the order of their failures.

        Empty before the first failure was noted. A rank that died without a traceback counts from when it was last seen
        alive: the collectives of the others fail a moment after its death.
        """
        found = (failure_of(r, self._host, self._started_at, self._watcher.step_of) for r in self._records)
        return [failure for _, failure in sorted(filter(None, found), key=lambda pair: pair[0])]

    def fates(self) -> list[str]:
        """Return a line for each rank that did not fail by itself: how it ended, or that it still runs."""
        failed = {failure.rank for failure in self.failures()}
        fates = []
        for record in self._records:
            if record.rank not in failed:
                record.refresh()
                fates.append(describe_outcome(record))
        return fates

    @property
    def flight(self) -> Mapping[int, FlightRecord]:
        """The content of the ranks' flight recorders when they were last read, by rank."""
        return self._watcher.records

    def error(self, notes: Sequence[str]) -> LaunchError:
        """Return the error of the job: its failures, how the other ranks ended, and then ``notes``."""
        notes = [*self.fates(), *self.notes, *notes]
        return LaunchError(
            *(self.failures(), self._world_size, notes),
            divergence=self.divergence,
            flight=self.flight,
            asked=self.asked_to_end,
        )
